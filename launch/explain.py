"""Analyzes one recorded step of a run and prints the findings on one page.

    python launch/explain.py runs/quickstart/grpo --step 0
    python launch/launch.py --nproc_per_node 2 launch/explain.py runs/tp2 --step 3  # run's layout

The records of the step are checked. The sequences of the step are also replayed through the Hugging
Face model and the trainer's model to find where the two models first differ. Exit code 0: no
difference was found; 1: a difference was found and is printed; 2: there was no data to check.
"""

import sys

from megatron_rl.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["explain", *sys.argv[1:]]))
