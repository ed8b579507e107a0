"""Processes of their own for what is measured, tried or asked."""
