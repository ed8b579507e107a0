"""The search for the best settings: trials of a few epochs, of which the poorer end early."""
