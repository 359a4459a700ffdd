"""Command-line interface, used by the scripts in launch/ and by user scripts.

A user script starts with `from megatron_rl.cli import cli`. Hydra is used only in this package and
in launcher/compose.py.
"""

import os

# avoids a NUMA warning on every rank; must be set before torch is imported
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# ensures that gathers start before matmuls (megatron-core 0.16.1, tensor_parallel/layers.py)
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

from megatron_rl.cli.app import cli

__all__ = ["cli"]
