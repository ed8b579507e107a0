"""What all else stands on: errors, text, thresholds, and the processes of this machine."""
