"""Generators of datasets and of small models."""
