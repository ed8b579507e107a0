"""Where records live: the only room that knows CSV."""
