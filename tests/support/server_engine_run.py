"""A short run of the task in custom_task.py, under torchrun or as a single process.

    python server_engine_run.py MODEL_FOLDER RUN_FOLDER [WORD ...]

Without further overrides, the engines are colocated.
"""

import sys

from megatron_rl.cli import cli
from tests.support.custom_task import TwoImageTask

OVERRIDES = (
    "task=mine", "task.max_new_tokens=12", "task.eval_samples=0", "run.steps=3", "batch.prompts_per_step=3", "batch.group_size=4",
    "optim.lr=1e-4", "algo.kl_coef=0.01", "engine.kv_cache_mib=32", "engine.max_model_len=1024",
    "checkpoint.every=3",
)  # fmt: skip
SERVER_ENGINE_OVERRIDES = ("engine.mode=server", "engine.health_timeout_s=60")


def run_cli() -> None:
    model, folder, *more = sys.argv[1:]
    sys.argv[1:] = [*OVERRIDES, f"model.path={model}", f"run.dir={folder}", *more]
    cli(tasks={"mine": TwoImageTask})


if __name__ == "__main__":
    run_cli()
