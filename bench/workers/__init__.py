"""A case in a process of its own, where it runs, and what is examined before it does."""
