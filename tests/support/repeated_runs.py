"""Three runs in one process: the second in another folder and within an event loop, as in a
notebook; the third repeats the first, which is finished.

    python repeated_runs.py MODEL_FOLDER RUN_FOLDER OTHER_RUN_FOLDER
"""

import asyncio
import sys

from megatron_rl.config import BatchSettings, EngineSettings, ModelSettings, OptimSettings, RunSettings, Settings, TaskSettings
from megatron_rl.entrypoints.train import run
from megatron_rl.registry import Plugins
from tests.support.custom_task import TwoImageTask


def make_settings(folder: str) -> Settings:
    return Settings(
        model=ModelSettings(path=sys.argv[1], min_pixels=3136, max_pixels=20000),
        engine=EngineSettings(kv_cache_mib=16, max_model_len=512),
        optim=OptimSettings(lr=3e-3),
        batch=BatchSettings(prompts_per_step=2, group_size=2),
        task=TaskSettings(name="mine", max_new_tokens=6, eval_samples=2),
        run=RunSettings(dir=folder, steps=2),
    )


async def run_in_loop() -> None:
    print(repr(run(make_settings(sys.argv[3]), Plugins(tasks={"mine": TwoImageTask}))))


if __name__ == "__main__":
    print(repr(run(make_settings(sys.argv[2]), Plugins(tasks={"mine": TwoImageTask}))))
    asyncio.run(run_in_loop())
    print(repr(run(make_settings(sys.argv[2]), Plugins(tasks={"mine": TwoImageTask}))))
