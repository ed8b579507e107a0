"""Whether two sets of repeats differ, and by more than a margin; whether they are equivalent.

`ratio` answers the first of times, bytes and joules, and `seeds` of losses and errors;
`equivalence` answers the second. `difference` is what all three compute with.

Nothing here sees what repeats cannot show: one sweep is one session, and what differs between
sessions (temperature, other load) counts as a difference between A and B.
"""
