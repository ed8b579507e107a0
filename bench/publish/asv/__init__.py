"""The asv view of the same cases: the plugin, and the site."""
