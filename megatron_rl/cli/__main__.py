"""Equivalent of launch/train.py for the installed package.

Usage: `torchrun -m megatron_rl.cli key=value ...`.
"""

from megatron_rl.cli import cli

if __name__ == "__main__":
    cli()
