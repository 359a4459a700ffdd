"""Published benchmarks: their original files, scoring (rewards/benchmark_rules.py) and metrics."""
