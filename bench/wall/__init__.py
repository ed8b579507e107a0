"""The largest batch that fits in memory: a line that predicts it, a search that closes on it."""
