"""A run whose reward function returns NaN for one of its examples. Run as a world by
test_not_finite_reward.py.

    nan_reward_run.py MODEL_FOLDER RUN_FOLDER
"""

import math
import sys

from megatron_rl.config import BatchSettings, EngineSettings, ModelSettings, RunSettings, Settings, TaskSettings
from megatron_rl.entrypoints.train import run
from megatron_rl.errors import RunFailed
from megatron_rl.registry import Plugins
from megatron_rl.rewards.rubric import RewardInput, RewardTerm, Rubric
from tests.support.custom_task import TwoImageTask

BAD_COLOR = "blue"
"""Example with a NaN reward. With three examples and two per step, it occurs in the first or the
second step.
"""


async def nan_reward(outcome: RewardInput) -> float:
    return math.nan if outcome.payload["color"] == BAD_COLOR else float(len("".join(outcome.replies)))


class NanRewardTask(TwoImageTask):
    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        self.rubric = Rubric(terms={"broken": RewardTerm(nan_reward)})


if __name__ == "__main__":
    settings = Settings(
        model=ModelSettings(path=sys.argv[1], min_pixels=3136, max_pixels=20000),
        engine=EngineSettings(kv_cache_mib=16, max_model_len=512),
        batch=BatchSettings(prompts_per_step=2, group_size=2),
        task=TaskSettings(name="mine", max_new_tokens=8),
        run=RunSettings(dir=sys.argv[2], steps=9),
    )
    try:
        run(settings, Plugins(tasks={"mine": NanRewardTask}))
    except RunFailed as failed:
        print(f"said: {failed}", flush=True)
        sys.exit(1)
