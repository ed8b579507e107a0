"""Where the time of a step goes, from what a profiler saw and from what was counted."""
