"""`python -m bench.why`: why one case is not faster than another by as much as was hoped."""
