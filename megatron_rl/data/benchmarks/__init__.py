"""Published benchmarks: file readers, scoring (rewards/benchmark_rules.py) and metrics."""
