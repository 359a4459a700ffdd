"""Model weights: transfer between Hugging Face tensors and Megatron, and checkpoint formats."""
