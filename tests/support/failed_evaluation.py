"""A run whose evaluation episodes fail with an InfraError, unless its last argument is `up`. Run by
test_failed_evaluation.py.

    python failed_evaluation.py MODEL_FOLDER RUN_FOLDER down|up
"""

import sys

from megatron_rl.config import (
    BatchSettings,
    CheckpointSettings,
    EngineSettings,
    ModelSettings,
    OptimSettings,
    RunSettings,
    Settings,
    TaskSettings,
)
from megatron_rl.entrypoints.train import run
from megatron_rl.errors import InfraError
from megatron_rl.registry import Plugins
from megatron_rl.types import Example, Message
from tests.support.custom_task import TwoImageEnv, TwoImageTask


class UnavailableEnv(TwoImageEnv):
    async def reset(self, seed: int) -> list[Message]:
        raise InfraError("the world is down")


class UnavailableEvalTask(TwoImageTask):
    def examples(self, split: str) -> list[Example]:
        return [Example(id=f"{split} {example.id}", payload=example.payload) for example in super().examples(split)]

    def env(self, example: Example) -> TwoImageEnv:
        return (UnavailableEnv if example.id.startswith("eval") and sys.argv[3] == "down" else TwoImageEnv)(str(example.payload["color"]))


if __name__ == "__main__":
    settings = Settings(
        model=ModelSettings(path=sys.argv[1], min_pixels=3136, max_pixels=20000),
        engine=EngineSettings(kv_cache_mib=16, max_model_len=512),
        optim=OptimSettings(lr=3e-3),
        batch=BatchSettings(prompts_per_step=2, group_size=2),
        task=TaskSettings(name="mine", max_new_tokens=12, eval_samples=2),
        run=RunSettings(dir=sys.argv[2], steps=2, outage_timeout_s=0.1),
        checkpoint=CheckpointSettings(every=2),
    )
    run(settings, Plugins(tasks={"mine": UnavailableEvalTask}))
