"""Compare two sweeps, or two values of one axis: which differences are real."""
