"""Model weights: streaming between Hugging Face names and Megatron, and checkpoint formats."""
