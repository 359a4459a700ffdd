"""The plan's bytes against what the allocator counts while a real policy takes a step on the device."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.batching.minibatches import PackItem
from megatron_rl.config import LoraSettings, ModelSettings, OptimSettings, ParallelSettings
from megatron_rl.distributed.world import connect, read_world
from megatron_rl.memory_plan.activations import compute_activation_memory
from megatron_rl.memory_plan.rank_shares import measure_footprint
from megatron_rl.models.hf_config import read_spec
from megatron_rl.policy.parallel import build_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.types import LossMetrics, TokenSequence

pytestmark = pytest.mark.gpu
NUM_TOKENS = 32768


@pytest.fixture
def world() -> Iterator[None]:
    connect(read_world(), timeout_s=120)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_stays_below_the_plan_and_near_it(world: None, random_model: Path, recompute: str) -> None:
    """A text of 32,768 tokens whose last 2,048 were sampled: what is held is counted exactly, the rest is planned at up to twice."""
    parallel = ParallelSettings(recompute=recompute)
    settings = ModelSettings(path=str(random_model), dtype="bfloat16", frozen=["vision", "merger"])
    before = torch.cuda.memory_allocated()
    policy = Policy(
        settings, build_layout(parallel, seed=0), parallel=parallel, optim=OptimSettings(), num_steps=2,
        banned_ids=[], image_token_id=7,
    )  # fmt: skip
    context = TokenSequence()
    context.extend([11] * (NUM_TOKENS - 2048))
    context.extend([12] * 2048, logprobs=[0.0] * 2048)
    batches = policy.pack([PackItem(context)], max_tokens=NUM_TOKENS)

    def step() -> None:
        policy.update(batches, lambda rows: (-rows.logprob_R.sum(), LossMetrics(sums={}, maxima={})), step=0)

    step()  # makes the moments
    held = measure_footprint(policy.network.model, policy.network.optimizer)
    resident = torch.cuda.memory_allocated()
    assert resident - before == pytest.approx(held.param_bytes + held.grad_bytes + held.main_weight_bytes + held.moment_bytes, rel=0.05)
    torch.cuda.reset_peak_memory_stats()
    step()
    planned = compute_activation_memory(
        read_spec(random_model), parallel, stage=0, num_tokens=NUM_TOKENS, max_patches=4, itemsize=2, lora=LoraSettings(),
        frozen=settings.frozen,
    ).total_bytes  # fmt: skip
    assert planned / 2 <= torch.cuda.max_memory_allocated() - resident <= planned
