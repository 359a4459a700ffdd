"""Starts the processes of a run, with torchrun's arguments and a graceful shutdown.

    python launch/launch.py --nproc_per_node 2 launch/train.py experiment=numberline_grpo_cpu

If a process fails, the last line of the output is the error message of this process. The launcher
returns the exit code of the first process that failed. Exit code 75: the run stopped on request,
and the same command resumes it.
"""

import sys

from megatron_rl.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["launch", *sys.argv[1:]]))
