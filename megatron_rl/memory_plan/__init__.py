"""Plans of a run's memory and step time, computed without GPUs or weights."""
