"""Trainable models on Megatron-Core: policy, critic, optimizer and training checkpoints."""
