"""Command line of one attempt of a run (launch/attempt.py)."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.run.process import run_attempt


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code of the command."""
    parser = argparse.ArgumentParser(prog="attempt.py", description="Run a command as one attempt, as in a Slurm job.")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="write the output of the command to FOLDER/attempt_N")
    parser.add_argument("--requeue", action="store_true", help="in a Slurm job: requeue the job if SIGUSR1 stopped the command")
    parser.add_argument("command", nargs="+", metavar="-- COMMAND")
    options = parser.parse_args(arguments)
    try:
        return run_attempt(options.command, logs=options.logs, requeues=options.requeue)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
