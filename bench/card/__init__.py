"""Everything a GPU must show, by one command; see `bench.card.__main__`."""
