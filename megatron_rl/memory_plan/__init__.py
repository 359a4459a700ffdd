"""Memory and time plans of a run, computed without GPUs or weights."""
