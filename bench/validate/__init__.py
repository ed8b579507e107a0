"""Checks of whether a folder of results can be believed, one for each claim that its rows make.

A claim is one function in `bench.validate.claims`: it reads the `Evidence` of a folder and yields
contradictions in it, or with a data sheet or the repository. Nothing is measured, and torch is not
imported.
"""
