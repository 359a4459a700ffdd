"""Explains a recorded step by replaying it through Hugging Face's model and the trainer's model."""
