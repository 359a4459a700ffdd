"""Estimates of a run's memory usage and step time, computed without GPUs or weights."""
