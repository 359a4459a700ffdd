"""Two GRPO steps of a model of any family, tensor or expert parallel over all ranks, or with
adapters. Run by test_family_runs.py.

    python family_run.py MODEL_FOLDER RUN_FOLDER tp|ep|lora
"""

import os
import sys

from megatron_rl.config import (
    AlgoSettings,
    BatchSettings,
    EngineSettings,
    LoraSettings,
    ModelSettings,
    OptimSettings,
    ParallelSettings,
    RunSettings,
    Settings,
    TaskSettings,
)
from megatron_rl.config.task_options import EZPointsOptions
from megatron_rl.entrypoints.train import run
from megatron_rl.models.hf_config import read_spec
from megatron_rl.registry import Plugins

if __name__ == "__main__":
    model, folder, kind, size = *sys.argv[1:], int(os.environ.get("WORLD_SIZE", "1"))
    sequence = size > 1 and read_spec(model).experts is not None
    run(
        Settings(
            model=ModelSettings(path=model, min_pixels=12000, max_pixels=17000),
            lora=LoraSettings(rank=8 if kind == "lora" else 0, targets=["attention", "mlp"]),
            parallel=ParallelSettings(ep=size) if kind == "ep" else ParallelSettings(tp=size, sequence_parallel=sequence),
            engine=EngineSettings(kv_cache_mib=32, max_model_len=512),
            algo=AlgoSettings(entropy_coef=0.1),
            optim=OptimSettings(lr=1e-2),
            batch=BatchSettings(prompts_per_step=2, group_size=4),
            task=TaskSettings(name="ez_points", options=EZPointsOptions(), max_turns=2, max_new_tokens=8),
            run=RunSettings(dir=folder, steps=2),
        ),
        Plugins(),
    )
