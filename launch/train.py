"""Trains what the settings say. See `python launch/train.py --help`."""

from megatron_rl.cli import cli

if __name__ == "__main__":
    cli()
