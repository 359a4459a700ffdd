"""Conversion, merging and comparison of checkpoints."""
