"""Lanes on the nodes of a Ray cluster. ray is imported only where one is joined or started."""
