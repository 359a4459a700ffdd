"""Starts as many processes as torchrun would, with torchrun's own arguments; they stop well, and the last line is what they had to say.

    python launch/spawn.py --nproc_per_node 2 launch/train.py experiment=numberline_grpo_cpu

Exit code: that of the first process that ended badly. 75: the run was asked to stop and did; the same command goes on.
"""

import sys

from megatron_rl.launcher.spawn import launch_processes

if __name__ == "__main__":
    sys.exit(launch_processes(sys.argv[1:]))
