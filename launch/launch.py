"""Starts processes like torchrun, with the same arguments, but with a graceful stop.

    python launch/launch.py --nproc_per_node 2 launch/train.py experiment=numberline_grpo_cpu

The last output line is the processes' own error. Exit code: that of the first process that failed.
75: the run stopped on request, and the same command resumes it.
"""

import sys

from megatron_rl.launcher.spawn import launch_processes

if __name__ == "__main__":
    sys.exit(launch_processes(sys.argv[1:]))
