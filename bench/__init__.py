"""Measure what precision, batch size and loss scale do to time, memory and learning on this GPU."""
