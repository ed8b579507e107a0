"""Joining folders of a sweep's shards, lanes or machines into one."""
