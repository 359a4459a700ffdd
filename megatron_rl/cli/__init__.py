"""The door: `from megatron_rl.cli import cli` in a file of your own, or the scripts in launch/. Hydra ends here."""

from megatron_rl.cli.door import cli

__all__ = ["cli"]
