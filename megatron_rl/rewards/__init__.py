"""Rewards: rubrics, answer comparison, judges and their caches."""
