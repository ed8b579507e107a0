"""This machine: its GPUs, their readings, their limits, and what its host is."""
