"""A run on disk and as processes: run directory, checkpoints, records, signals and status."""
