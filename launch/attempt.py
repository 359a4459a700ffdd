r"""Runs a command as one attempt of a run; forwards signals to the command and logs the output.

    python launch/attempt.py --logs RUN/logs --requeue -- \
        bash launch/slurm/nodes.sh experiment=numberline_grpo_cpu

With --requeue, the Slurm job is requeued if its time limit stopped the run. The job script
launch/slurm/train.sbatch runs this script.
"""

import argparse
import sys
from pathlib import Path

from megatron_rl.run.process import run_attempt

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="attempt.py", description="Run a command as one attempt, as in a Slurm job.")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="write the output of the command to FOLDER/attempt_N")
    parser.add_argument("--requeue", action="store_true", help="in a Slurm job: requeue the job if SIGUSR1 stopped the command")
    parser.add_argument("command", nargs="+", metavar="-- COMMAND")
    options = parser.parse_args()
    try:
        sys.exit(run_attempt(options.command, logs=options.logs, requeues=options.requeue))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
