"""Compares two or more evaluations in a table.

    python launch/compare.py runs/evaluations/before runs/evaluations/after

The table has success with its confidence interval, the paired difference to the first evaluation,
and the conditions that differ. Takes directories written by launch/evaluate.py.
"""

import sys

from megatron_rl.cli.compare import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
