"""The door: `from megatron_rl.cli import cli` in a file of your own, or the scripts in launch/. Hydra ends here."""

import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported: no page about NUMA binding from every rank

from megatron_rl.cli.door import cli

__all__ = ["cli"]
