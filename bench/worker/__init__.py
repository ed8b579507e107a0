"""One case in one process."""
