r"""Runs a command as one attempt of a run; forwards signals to the command and logs the output.

    python launch/attempt.py --logs RUN/logs --requeue -- \
        bash launch/slurm/nodes.sh experiment=numberline_grpo_cpu

With --requeue, the Slurm job is requeued if its time limit stopped the run. The job script
launch/slurm/train.sbatch runs this script.
"""

import sys

from megatron_rl.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["attempt", *sys.argv[1:]]))
