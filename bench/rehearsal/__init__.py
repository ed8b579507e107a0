"""A training step on the CPU, checked for what a GPU does badly."""
