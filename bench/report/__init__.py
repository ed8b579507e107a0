"""Reads records and says what they mean: tables, figures, one page; it measures nothing."""
