"""One case, measured in one process."""
