"""The card: what is read of it, which there are, and what was seen while a worker trained."""
