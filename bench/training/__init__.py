"""Training: epochs, their timing, loss scaling and the check of the precision that ran."""
