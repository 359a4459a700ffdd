"""Trains with the given settings; see `python launch/train.py --help`."""

from megatron_rl.cli import cli

if __name__ == "__main__":
    cli()
