"""Command-line interface, used by the scripts in launch/ and by a user's own script.

Hydra is used only here. A script of your own starts with `from megatron_rl.cli import cli`.
"""

import os

# must be set before torch is imported; avoids NUMA warnings on all ranks
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# so that gathers start before matmuls (megatron-core 0.16.1, tensor_parallel/layers.py)
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

from megatron_rl.cli.app import cli

__all__ = ["cli"]
