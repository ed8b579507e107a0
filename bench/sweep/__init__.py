"""A sweep: what is asked for, refused, planned, shown and run."""
