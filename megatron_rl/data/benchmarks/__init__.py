"""Published benchmarks: their files as they are, their scoring (rewards/benchmark_rules.py), and the figures that are quoted of them."""
