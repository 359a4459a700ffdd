"""Environments of this package for task=gymnasium, and adapters of environments of others."""
