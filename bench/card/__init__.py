"""Every measurement of a new GPU, by one command; see `bench.card.__main__`."""
