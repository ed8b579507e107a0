"""Runs and cases as they are read: what was measured, what it amounts to, and what to doubt."""
