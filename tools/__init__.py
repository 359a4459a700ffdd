"""Command-line tools for checkpoints and datasets."""
