"""A run with run.max_staleness of a task that shows an image before each of its two turns and whose
tool calls sometimes take long. Run by e2e/test_slow_looks.py.

    slow_env_run.py MODEL_FOLDER RUN_FOLDER ENGINE_TP
"""

import asyncio
import random
import sys
from dataclasses import dataclass

from megatron_rl.config import (
    AlgoSettings,
    BatchSettings,
    EngineSettings,
    ModelSettings,
    OptimSettings,
    RolloutStoreSettings,
    RunSettings,
    Settings,
    TaskSettings,
)
from megatron_rl.entrypoints.train import run
from megatron_rl.registry import Plugins
from megatron_rl.rollout.task import Env, Step, Task
from megatron_rl.types import Example, Message
from tests.support.packed_example import make_picture, user_message

STEPS, PROMPTS, SIZE = 14, 4, 6


@dataclass
class SlowEnv(Env):
    """Rewards the fraction of a response's characters that are lowercase letters."""

    number: int
    turns: int = 0

    async def reset(self, seed: int) -> list[Message]:
        self.rng = random.Random()
        return [user_message("What is this?", make_picture(self.number, 112, 56))]

    async def step(self, text: str) -> Step:
        await asyncio.sleep(0.8 if self.rng.random() < 0.2 else 0.01)
        self.turns += 1
        reward = sum("a" <= letter <= "z" for letter in text) / max(len(text), 1)
        return Step(messages=[user_message("And this?", make_picture(10 + self.number, 84, 56))], reward=reward, done=self.turns == 2)


class SlowEnvTask(Task):
    def examples(self, split: str) -> list[Example]:
        return [Example(id=f"{number}", payload={}) for number in range(7 if split == "train" else 2)]

    def env(self, example: Example) -> SlowEnv:
        return SlowEnv(int(example.id))


if __name__ == "__main__":
    settings = Settings(
        model=ModelSettings(path=sys.argv[1]),
        engine=EngineSettings(kv_cache_mib=16, max_model_len=512, tp=int(sys.argv[3])),
        optim=OptimSettings(lr=3e-3),
        batch=BatchSettings(prompts_per_step=PROMPTS, group_size=SIZE),
        algo=AlgoSettings(rollout_correction="token_tis"),
        task=TaskSettings(name="looks", max_new_tokens=16),
        run=RunSettings(dir=sys.argv[2], steps=STEPS, max_staleness=1),
        rollouts=RolloutStoreSettings(keep_best=PROMPTS * SIZE),
    )
    run(settings, Plugins(tasks={"looks": SlowEnvTask}))
