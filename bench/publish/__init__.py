"""The folder that is published: asv's site and the page of every sweep."""
