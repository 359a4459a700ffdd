"""All runs of a sweep, printed and plotted: what differs, evaluation with its 95% interval, steps, hours, and how each stands.

    python launch/sweep_table.py launch/slurm/example.yaml    # waiting, running, finished, stopped, or failed with its error line
    python launch/sweep_table.py runs/example                 # the same of a folder of runs, however they were started

The picture is sweep.png beside the run folders, or what --out names.
"""

import sys

from megatron_rl.launcher.sweep_report import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
