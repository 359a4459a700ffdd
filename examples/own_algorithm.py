"""Train with your own algorithm: an advantage function and a policy loss.

    python launch/launch.py --nproc_per_node 2 examples/own_algorithm.py

The advantage of a rollout is its distance from the median reward of its group, divided by the mean
distance. Unlike the mean of GRPO, the median does not move if one episode collects many penalties.
The policy loss is the importance-sampling ratio times the advantage, without clipping.

Expect `return` to rise in the printed steps, as it does with algo=grpo in the quickstart.
"""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_rl.algo import policy_losses
from megatron_rl.algo.advantages import split_into_groups, write_turn_advantages
from megatron_rl.algo.algorithms import Algorithm
from megatron_rl.cli import cli
from megatron_rl.config import AlgoSettings
from megatron_rl.types import LossInputs, Rollout

MODEL = "runs/quickstart/sft/final"
DEFAULTS = [
    "experiment=numberline_grpo_cpu",
    f"model.path={MODEL}",
    "algo.name=median",
    "run.dir=runs/examples/own_algorithm",
    "run.steps=25",
]


def median_advantages(rollouts: Sequence[Rollout], algo: AlgoSettings) -> None:
    """Write (R - median) / (mean distance from the median + std_eps) to every turn of a rollout."""
    for members in split_into_groups(rollouts).values():
        rewards = [rollout.reward for rollout in members if rollout.reward is not None]
        median = statistics.median(rewards)
        scale = statistics.fmean(abs(reward - median) for reward in rewards) + algo.std_eps
        for rollout, reward in zip(members, rewards, strict=True):
            write_turn_advantages(rollout, [(reward - median) / scale] * len(rollout.turns))


def policy_gradient(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return one loss value for each sampled token; the trainer averages them."""
    return -rows.advantage_R * policy_losses.log_ratio(rows).exp()


MEDIAN = Algorithm(advantage_fn=median_advantages, policy_loss=policy_gradient, clip_bounds=policy_losses.no_bounds)

if __name__ == "__main__":
    if not any(word.startswith("model.path=") for word in sys.argv) and not Path(MODEL).exists():
        sys.exit(f"error: model.path={MODEL}: no such folder; bash launch/quickstart.sh creates it")
    sys.argv[1:1] = DEFAULTS
    cli(algorithms={"median": MEDIAN})
