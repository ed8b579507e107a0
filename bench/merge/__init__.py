"""One sweep's folder from several: those of its shards, lanes or machines."""
