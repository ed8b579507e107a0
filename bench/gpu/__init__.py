"""GPUs: the ones of this machine, their readings, and what was recorded while a worker trained."""
