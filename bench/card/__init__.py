"""Every measurement of a new GPU, by one command."""
