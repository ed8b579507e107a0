"""The asv view of the same cases: the plugin, and sweeps as asv results."""
