"""A policy in the test's own process, in a gloo world of size 1, for tests that take seconds."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.config import LoraSettings, ModelSettings, OptimSettings, ParallelSettings
from megatron_rl.distributed.world import connect, read_world
from megatron_rl.policy.network import TrainingSettings
from megatron_rl.policy.parallel import build_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.rollout.renderer import Renderer

_opened: list[Policy] = []


def close_with_world(policy: Policy) -> Policy:
    """Register the policy to be closed together with the world.

    Otherwise its process groups would stay, each with a thread that wakes up a hundred times per
    second.
    """
    _opened.append(policy)
    return policy


@contextmanager
def single_process_world() -> Iterator[None]:
    connect(read_world(), timeout_s=60)
    try:
        yield
    finally:
        while _opened:
            _opened.pop().close()
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def make_policy_and_renderer(
    model: Path, optim: OptimSettings, *, num_steps: int = 10, lora: LoraSettings | None = None, dtype: str = "float32", **settings: object
) -> tuple[Policy, Renderer]:
    """Create a policy from a model folder, and its renderer. Requires a world."""
    chosen, parallel = ModelSettings(path=str(model), dtype=dtype), ParallelSettings()
    renderer = Renderer(chosen)
    policy = Policy(
        chosen, build_layout(parallel, seed=0),
        training=TrainingSettings(parallel=parallel, optim=optim, num_steps=num_steps, lora=lora or LoraSettings()),
        special_tokens=renderer.special_tokens, **settings,
    )  # fmt: skip
    return close_with_world(policy), renderer
