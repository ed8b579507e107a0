"""One folder to read anywhere."""
