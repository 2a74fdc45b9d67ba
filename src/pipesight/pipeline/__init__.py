"""One process, many devices: the pipeline engine."""
