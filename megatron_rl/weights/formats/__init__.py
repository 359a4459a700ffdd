"""Readers and writers of checkpoint formats, converters between them, and integrity checks."""
