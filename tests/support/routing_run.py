"""GRPO steps of a model with experts, with an engine that chooses its experts by other logits. Run
by test_routing_replay_run.py.

    python routing_run.py MODEL_FOLDER RUN_FOLDER ROUTING_REPLAY ENGINE_TP [ROLLOUTS_TO_REPLAY]
        [--steps N] [--checkpoint-every N] [--stale] [--lr LR]

With --stale, episodes have slow tools and continue across weight updates.
"""

import argparse
import os
from typing import Any

import torch

from megatron_rl.config import (
    AlgoSettings,
    BatchSettings,
    CheckpointSettings,
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
from tests.support.slow_env_run import SlowEnvTask

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
    parser = argparse.ArgumentParser()
    for name in ("model", "folder", "replay"):
        parser.add_argument(name)
    parser.add_argument("engine_tp", type=int)
    parser.add_argument("recorded", nargs="?", default="")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--checkpoint-every", type=int, default=0)
    parser.add_argument("--stale", action="store_true")
    parser.add_argument("--lr", type=float, default=1e-3)
    given = parser.parse_args()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if not given.recorded:
        plant_other_choices()
    games = TaskSettings(name="ez_points", options=EZPointsOptions(), max_turns=2, max_new_tokens=8)
    run(
        Settings(
            model=ModelSettings(path=given.model, min_pixels=12000, max_pixels=17000),
            parallel=ParallelSettings(tp=size, sequence_parallel=size > 1),
            engine=EngineSettings(kv_cache_mib=32, max_model_len=512, tp=given.engine_tp),
            algo=AlgoSettings(
                entropy_coef=0.1, kl_coef=0.01, routing_replay=given.replay, rollout_correction="token_tis" if given.stale else "none"
            ),
            optim=OptimSettings(lr=given.lr),
            batch=BatchSettings(prompts_per_step=2, group_size=4, minibatches=2),
            task=TaskSettings(name="looks", max_new_tokens=8) if given.stale else games,
            run=RunSettings(
                dir=given.folder,
                steps=given.steps,
                max_logprob_abs_diff=100.0,
                mode="replay" if given.recorded else "train",
                max_staleness=int(given.stale),
            ),
            rollouts=RolloutStoreSettings(save="all", replay_from=given.recorded),
            checkpoint=CheckpointSettings(every=given.checkpoint_every),
        ),
        Plugins(tasks={"looks": SlowEnvTask}),
    )
