"""Published benchmarks: their files as they are, their scoring (rewards/official.py), and the figures that are quoted of them."""
