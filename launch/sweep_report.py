"""Prints and plots all runs of a sweep.

    python launch/sweep_report.py launch/slurm/example.yaml    # a sweep
    python launch/sweep_report.py runs/example                 # a directory of runs

For each run, the table lists the parameters, the success rate with a 95% confidence interval, the
number of steps, the duration in hours and the state (waiting, running, finished, stopped or
failed). Errors of failed runs are listed below the table. The plot is written to sweep.png next to
the run directories, or to the file given by --out.
"""

import sys

from megatron_rl.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["sweep-report", *sys.argv[1:]]))
