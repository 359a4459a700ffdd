"""Does the same as launch/train.py once installed: `torchrun -m megatron_rl.cli key=value ...`."""

from megatron_rl.cli import cli

if __name__ == "__main__":
    cli()
