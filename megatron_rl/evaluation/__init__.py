"""Evaluation during training (in_run.py), evaluation of checkpoints, and paired comparisons."""
