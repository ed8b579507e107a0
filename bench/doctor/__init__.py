"""What this machine can measure, and whether what it measures can be believed."""
