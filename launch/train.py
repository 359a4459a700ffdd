"""Trains with the given settings; see `python launch/train.py --help`."""

import sys

from megatron_rl.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
