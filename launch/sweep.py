"""Many runs from one yaml: overrides in common, and a grid, a list or random draws of what differs (docs/cluster.md).

    python launch/sweep.py launch/slurm/example.yaml --print      # the tasks, and how their run folders stand
    python launch/sweep.py launch/slurm/example.yaml --local 2    # all of them on this machine, two at a time
    python launch/sweep.py launch/slurm/example.yaml --task 3     # one of them: what launch/slurm/sweep.sbatch does

Exit code 0: what was asked for is finished; 75: stopped, the same command goes on; else the highest of a run's.
"""

import sys
from pathlib import Path

from megatron_rl.launcher.sweep import sweep_main

if __name__ == "__main__":
    sys.exit(sweep_main(sys.argv[1:], launch=Path(__file__).resolve().parent))
