"""Run directory, checkpoints, records, processes, signals and status of a run."""
