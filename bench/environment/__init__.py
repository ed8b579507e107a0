"""What a case runs on: host, code, torch, GPU; and the models it trains."""
