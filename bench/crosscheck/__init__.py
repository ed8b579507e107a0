"""Time and memory measured a second time, by code of its own; see `bench.crosscheck.__main__`."""
