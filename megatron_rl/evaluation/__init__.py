"""Evaluations during training (in_run.py) and of single checkpoints, and paired comparisons."""
