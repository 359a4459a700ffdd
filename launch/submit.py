"""A run as a Slurm job: writes script and settings into the run folder and submits it (docs/cluster.md).

    python launch/submit.py experiment=numberline_grpo_cpu slurm.nodes=2 slurm.time=8:00:00 --dry-run    # writes, and submits nothing
    python launch/submit.py experiment=numberline_grpo_cpu slurm.nodes=2 slurm.requeue=true -- --account=mine --partition=cpu

Behind `--` stands what else sbatch should know; in a yaml slurm.sbatch says the same: [--account=mine].
"""

import sys

from megatron_rl.launcher.slurm import submit_main

if __name__ == "__main__":
    sys.exit(submit_main(sys.argv[1:]))
