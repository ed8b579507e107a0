"""Whether a case's training is sound, before anything of it is measured."""
