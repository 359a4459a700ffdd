"""Explains a recorded step on one page.

    python launch/explain.py runs/quickstart/grpo --step 0
    python launch/launch.py --nproc_per_node 2 launch/explain.py runs/tp2 --step 3  # run's layout

The step is checked and replayed through Hugging Face's model and the trainer's, to find where they
first differ. Exit code: 0 all agree; 1 something differs, and is named; 2 there was no data to
check.
"""

import sys
import warnings

from megatron_rl.cli.explain import main

if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="megatron")
    # megatron-core 0.16.1 uses deprecated names of collectives
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    sys.exit(main(sys.argv[1:]))
