"""Same as launch/train.py for an installed package: `torchrun -m megatron_rl.cli key=value ...`."""

from megatron_rl.cli import cli

if __name__ == "__main__":
    cli()
