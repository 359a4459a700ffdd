"""Evaluation during training (in_run.py) and of checkpoints, and paired comparisons."""
