"""The GPUs of this machine, their readings, and what a monitor records while a worker trains."""
