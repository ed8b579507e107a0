"""What limits a training step, and why another one is faster or slower.

Plain arithmetic over what was counted, timed and measured: no torch, no pandas.
"""
