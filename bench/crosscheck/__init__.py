"""Time and memory measured a second time, by independent code; see `bench.crosscheck.__main__`."""
