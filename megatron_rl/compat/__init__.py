"""Workarounds that make Megatron-Core and torchvision usable without a GPU."""
