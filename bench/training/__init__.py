"""Training: an epoch, its clock, its loss scale and the proof of its precision."""
