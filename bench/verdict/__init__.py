"""Tests of whether two sets of repeats differ by more than a margin, or are equivalent.

`ratio` tests times, bytes and joules for a difference, and `seeds` losses and errors; `equivalence`
tests for equivalence. All three build on `difference`.

Repeats cannot show differences between sessions: one sweep is one session, so temperature or other
load that differs between sessions counts as a difference between A and B.
"""
