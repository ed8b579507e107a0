"""A search for the best training setting of this machine, by one command."""
