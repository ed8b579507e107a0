"""Checks that the training of a case is sound, made before anything is measured."""
