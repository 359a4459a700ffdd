"""Two GRPO steps of a model with experts, with an engine that chooses its experts by other logits.
Run by test_routing_replay_run.py.

    python routing_run.py MODEL_FOLDER RUN_FOLDER ROUTING_REPLAY ENGINE_TP [ROLLOUTS_TO_REPLAY]
"""

import os
import sys
from typing import Any

import torch

from megatron_rl.config import (
    AlgoSettings,
    BatchSettings,
    EngineSettings,
    ModelSettings,
    OptimSettings,
    ParallelSettings,
    RolloutStoreSettings,
    RunSettings,
    Settings,
    TaskSettings,
)
from megatron_rl.config.task_options import EZPointsOptions
from megatron_rl.entrypoints.train import run
from megatron_rl.registry import Plugins

MIXES = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def choose_by_mixed_logits(router: Any, hidden: torch.Tensor, logits: torch.Tensor, ids: torch.dtype | None, **_: Any) -> tuple:
    """Replace vLLM's choice of experts; their weights are computed from the router's own logits.

    A token that is computed again has the same experts.
    """
    chosen = (logits @ MIXES).topk(router.top_k).indices
    return logits.float().gather(1, chosen).softmax(-1), chosen.to(ids or torch.int32)


def plant_other_choices() -> None:
    os.environ.update(VLLM_LOGGING_LEVEL="CRITICAL")
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    CPURouter._compute_routing = choose_by_mixed_logits


if __name__ == "__main__":
    model, folder, replay, engine_tp, *recorded = sys.argv[1:]
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if not recorded:
        plant_other_choices()
    run(
        Settings(
            model=ModelSettings(path=model, min_pixels=12000, max_pixels=17000),
            parallel=ParallelSettings(tp=size, sequence_parallel=size > 1),
            engine=EngineSettings(kv_cache_mib=32, max_model_len=512, tp=int(engine_tp)),
            algo=AlgoSettings(entropy_coef=0.1, kl_coef=0.01, routing_replay=replay),
            optim=OptimSettings(lr=1e-3),
            batch=BatchSettings(prompts_per_step=2, group_size=4, minibatches=2),
            task=TaskSettings(name="ez_points", options=EZPointsOptions(), max_turns=2, max_new_tokens=8),
            run=RunSettings(dir=folder, steps=2, max_logprob_abs_diff=100.0, mode="replay" if recorded else "train"),
            rollouts=RolloutStoreSettings(save="all", replay_from=recorded[0] if recorded else ""),
        ),
        Plugins(),
    )
