"""Evaluations without a run: of a checkpoint by itself, and of two beside each other. In a run it is in_run.py that evaluates."""
