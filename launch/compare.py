"""Compares two or more evaluations in a table.

    python launch/compare.py runs/evaluations/before runs/evaluations/after

The arguments are directories written by launch/evaluate.py. The table contains each evaluation's
success rate with its confidence interval and the paired difference from the first evaluation.
Conditions that differ between the evaluations are listed below the table.
"""

import sys

from megatron_rl.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))
