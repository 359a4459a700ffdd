"""The door: `from megatron_rl.cli import cli` in a file of your own, or the scripts in launch/. Hydra ends here."""

import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported: no page about NUMA binding from every rank
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # megatron-core 0.16.1, tensor_parallel/layers.py: gathers begin before products

from megatron_rl.cli.app import cli

__all__ = ["cli"]
