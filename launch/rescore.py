r"""Recomputes the rewards of recorded rollouts; takes the arguments of launch/train.py.

    python launch/rescore.py experiment=visual_search_python_cpu task.reward=accuracy \
        run.replay=runs/agent/rollouts run.dir=runs/by_rule
    python launch/train.py experiment=visual_search_python_cpu run.replay=runs/by_rule/rollouts \
        run.eval_every=0 run.dir=runs/retrained

No episodes are generated; the task's reward, judge or rubric is applied to the recorded ones.
run.replay is the directory of rollouts of a run with run.record=all. If it is stopped or killed,
the same command resumes it.
"""

import sys

from megatron_rl.cli import cli

if __name__ == "__main__":
    sys.argv.insert(1, "rescore")
    cli()
