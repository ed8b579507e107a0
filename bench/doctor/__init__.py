"""Checks of what a machine can measure."""
