"""Records on disk, and what is derived from them: runs, pairs, warnings, verdicts."""
