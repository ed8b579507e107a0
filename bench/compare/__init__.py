"""What changed from one sweep to another, and how sure it is."""
