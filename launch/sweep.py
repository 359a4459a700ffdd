"""Runs a sweep, which a YAML file defines: many runs with common overrides (docs/cluster.md).

    python launch/sweep.py launch/slurm/example.yaml --print      # print tasks and run states
    python launch/sweep.py launch/slurm/example.yaml --local 2    # run all here, two at a time
    python launch/sweep.py launch/slurm/example.yaml --task 3     # run one, as in sweep.sbatch

The runs differ in a grid, a list or random draws of settings. Exit code 0: the requested runs are
finished; 75: stopped, the same command resumes; else the highest exit code of a run.
"""

import sys
from pathlib import Path

from megatron_rl.launcher.sweep import sweep_main

if __name__ == "__main__":
    sys.exit(sweep_main(sys.argv[1:], launch=Path(__file__).resolve().parent))
