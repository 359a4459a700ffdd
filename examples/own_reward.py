"""Train with your own reward: a plain Python function of the episode.

    python launch/launch.py --nproc_per_node 2 examples/own_reward.py

The quickstart's warm start plays NumberLine. The reward is 1 for an episode without a wrong move.
One wrong move reduces it to 1/3, two reduce it to 1/5.

Expect `return` to rise in the printed steps, and the rewards in runs/examples/own_reward. Every
setting can be changed on the command line, e.g. run.steps=50 or model.path=OTHER.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.cli import cli
from megatron_rl.types import Turn

MODEL = "runs/quickstart/sft/final"
DEFAULTS = [
    "experiment=numberline_grpo_cpu",
    f"model.path={MODEL}",
    "task.reward=few_mistakes",
    "run.dir=runs/examples/own_reward",
    "run.steps=25",
    "rollouts.save=all",
]
"""Settings of this example. Settings on the command line come later and take precedence."""


def few_mistakes(turns: Sequence[Turn]) -> float:
    """Return 1 / (1 + 2 * number of turns that the environment penalizes)."""
    return 1 / (1 + 2 * sum(turn.reward < 0 for turn in turns))


if __name__ == "__main__":
    if not any(word.startswith("model.path=") for word in sys.argv) and not Path(MODEL).exists():
        sys.exit(f"error: model.path={MODEL}: no such folder; bash launch/quickstart.sh creates it")
    sys.argv[1:1] = DEFAULTS
    cli(rewards={"few_mistakes": few_mistakes})
