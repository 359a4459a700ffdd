"""launch/train.py with tasks and an algorithm of the tests. They behave like those of the trainer
unless one of these files exists:

    HOME/nan_reward    episodes have reward NaN
    HOME/nan_loss      the loss of every token is NaN
    HOME/clock         time.time() is ahead (or behind) by the number of seconds in the file

HOME is the folder that contains the run directory's disk: run.dir=HOME/disk/run.
"""

import math
import sys
import time
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path

import torch

from megatron_rl.algo.algorithms import ALGORITHMS
from megatron_rl.cli import cli
from megatron_rl.config import AlgoSettings
from megatron_rl.rewards.rubric import RewardInput, Rubric, RubricScore
from megatron_rl.tasks.gym_cards.task import NumberLineTask
from megatron_rl.tasks.visual_python.env import AgentEnv
from megatron_rl.tasks.visual_python.pyvision import PyVisionProtocol
from megatron_rl.tasks.visual_python.task import VisualPythonTask
from megatron_rl.tasks.visual_search.task import SEARCH_RULES, VisualSearchTask
from megatron_rl.types import Example, LossInputs

HOME = next(Path(word.removeprefix("run.dir=")) for word in sys.argv if word.startswith("run.dir=")).parents[1]
GRPO = ALGORITHMS["grpo"]
score, now = Rubric.score, time.time


async def planted_score(self: Rubric, outcome: RewardInput) -> RubricScore:
    scored = await score(self, outcome)
    return replace(scored, reward=math.nan) if (HOME / "nan_reward").exists() else scored


def planted_loss(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    loss_R = GRPO.policy_loss(rows, algo)
    return loss_R * math.nan if (HOME / "nan_loss").exists() else loss_R


def jumped() -> float:
    try:
        return now() + float((HOME / "clock").read_text() or 0)
    except FileNotFoundError:
        return now()


class JudgedSearch(VisualPythonTask):
    """The visual-question task with the single line of rules that the warm start has learned."""

    def env(self, example: Example) -> AgentEnv:
        return AgentEnv(example, protocol=PyVisionProtocol(rules=SEARCH_RULES), pool=self._pool)


if __name__ == "__main__":
    resource_tracker._resource_tracker._fd = None  # the process gets its own tracker, like one that was not forked, which ends with it
    Rubric.score, time.time = planted_score, jumped
    tasks = {"chaos_line": NumberLineTask, "chaos_search": VisualSearchTask, "chaos_vqa": JudgedSearch}
    cli(tasks=tasks, algorithms={"chaos": replace(GRPO, policy_loss=planted_loss)})
