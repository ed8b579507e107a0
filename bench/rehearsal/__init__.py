"""A training step on the CPU under the rules of a GPU."""
