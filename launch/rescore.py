r"""Recomputes the rewards of recorded rollouts; takes the arguments of launch/train.py.

    python launch/rescore.py experiment=visual_search_python_cpu task.reward=accuracy \
        rollouts.replay_from=runs/agent/rollouts run.dir=runs/by_rule
    python launch/train.py experiment=visual_search_python_cpu run.mode=replay run.eval_every=0 \
        rollouts.replay_from=runs/by_rule/rollouts run.dir=runs/retrained

No episodes are generated; the task's reward, judge or rubric is applied to recorded episodes. Set
rollouts.replay_from to the rollouts directory of a run with rollouts.save=all. If rescoring is
stopped or killed, the same command resumes it.
"""

import sys

from megatron_rl.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["rescore", *sys.argv[1:]]))
