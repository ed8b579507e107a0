"""Whether a folder of results can be believed: each claim that its rows make, held against others.

A claim is one function in `bench.validate.claims`: it reads the `Evidence` of a folder and yields
what contradicts itself, a data sheet or the repository. Nothing is measured, and torch is not
imported.
"""
