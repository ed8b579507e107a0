"""Records on disk: the only part of the package that reads and writes CSV."""

# benchmarks/ asks the harness of any commit for this, by this name
from bench.store.reader import read_records

__all__ = ["read_records"]
