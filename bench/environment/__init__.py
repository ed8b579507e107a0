"""The environment of a case (host, code, torch and GPU) and the models that it trains."""
