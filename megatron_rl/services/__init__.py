"""Servers that a run starts itself: engines, judges, sandboxes and partner models."""
