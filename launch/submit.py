r"""Submits a run as a Slurm job (docs/cluster.md).

    python launch/submit.py experiment=numberline_grpo_cpu slurm.nodes=2 slurm.time=8:00:00 \
        --dry-run    # writes script and settings without submitting
    python launch/submit.py experiment=numberline_grpo_cpu slurm.nodes=2 slurm.requeue=true \
        -- --account=mine --partition=cpu

The job script and the settings are written to the run directory. Arguments after `--` are passed to
sbatch; in a YAML file, use slurm.sbatch: [--account=mine].
"""

import sys

from megatron_rl.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["submit", *sys.argv[1:]]))
