"""`torchrun -m megatron_rl.cli key=value ...`: launch/train.py where only the package is installed."""

from megatron_rl.cli import cli

if __name__ == "__main__":
    cli()
