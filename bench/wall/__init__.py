"""The largest batch that fits in memory: a linear prediction, and a search that brackets it."""
