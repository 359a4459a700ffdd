"""Data files: questions with images and answers, conversations, and published benchmarks."""
