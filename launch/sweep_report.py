"""Prints and plots all runs of a sweep.

    python launch/sweep_report.py launch/slurm/example.yaml    # a sweep
    python launch/sweep_report.py runs/example                 # a directory of runs

The table has the parameters that differ, evaluation with 95% interval, steps, hours and state
(waiting, running, finished, stopped, or failed with its error). The plot is sweep.png next to the
run directories, or the file given by --out.
"""

import sys

from megatron_rl.launcher.sweep_report import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
