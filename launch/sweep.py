"""Runs a sweep: many runs defined by one YAML file (docs/cluster.md).

    python launch/sweep.py launch/slurm/example.yaml --print      # print tasks and run states
    python launch/sweep.py launch/slurm/example.yaml --local 2    # run all here, two at a time
    python launch/sweep.py launch/slurm/example.yaml --task 3     # run one, as in sweep.sbatch

The settings of the runs are a grid, a list or random draws. Exit code 0: the requested runs are
finished; 75: stopped, and the same command resumes them; otherwise the highest exit code of a run.
"""

import sys
from pathlib import Path

from megatron_rl.launcher.sweep import sweep_main

if __name__ == "__main__":
    sys.exit(sweep_main(sys.argv[1:], launch=Path(__file__).resolve().parent))
