"""`python -m bench.why`: why one of two cases is faster, and not faster still."""
