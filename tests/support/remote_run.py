"""A short run, of the task in own_task.py, under torchrun or alone: python remote_run.py MODEL_FOLDER RUN_FOLDER [WORD ...]

Without words its engines are in its own processes.
"""

import sys

from megatron_rl.cli import cli
from tests.support.own_task import TwoLooksTask

WORDS = (
    "task=mine", "task.max_new_tokens=12", "task.eval_samples=1", "run.steps=3", "batch.prompts_per_step=3", "batch.group_size=4",
    "optim.lr=1e-4", "algo.kl_coef=0.01", "engine.kv_cache_mib=32", "checkpoint.every=3",
)  # fmt: skip
REMOTE = ("engine.mode=server", "engine.health_timeout_s=60")


def play() -> None:
    model, folder, *more = sys.argv[1:]
    sys.argv[1:] = [*WORDS, f"model.path={model}", f"run.dir={folder}", *more]
    cli(tasks={"mine": TwoLooksTask})


if __name__ == "__main__":
    play()
