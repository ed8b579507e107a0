"""A comparison of all measured cards, grouped by what may be compared."""
