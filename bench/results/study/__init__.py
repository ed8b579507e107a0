"""Records read back from sweeps: their measurements, derived quantities and warnings."""
