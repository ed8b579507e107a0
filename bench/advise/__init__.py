"""One command, one answer: what to train with on this machine."""
