"""What a machine can measure."""
