"""Runs a recipe's forward passes and updates at full size on FakeTensors, and prints what it
measured as JSON:

    python -m tests.support.cuda tests/support/full_size/measure.py RECIPE STAGE KIND

RECIPE is a name, or a name and overrides, separated by commas. STAGE is the pipeline stage of the
rank, KIND a key of KINDS.
"""

import json
import sys
import tempfile
from dataclasses import asdict, fields
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_rl.algo.algorithms import ALGORITHMS, needs_reference
from megatron_rl.build import build_critic
from megatron_rl.config import Settings
from megatron_rl.memory_plan.delta_net_memory import ChunkShape
from megatron_rl.memory_plan.rank_shares import fake_process_group, measure_footprint
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.known_models import HUB_IDS, make_released_config
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.policy.critic import Critic
from megatron_rl.policy.delta_rule import plan_chunks
from megatron_rl.policy.network import TrainingSettings
from megatron_rl.policy.parallel import build_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.registry import has_critic
from megatron_rl.training_batch import compute_logprobs_and_values
from megatron_rl.training_loop import make_updaters
from megatron_rl.types import MicroBatch, SpecialTokens
from tests.contracts.test_configs import settings_of
from tests.support.full_size import fake_kernels, fake_policy
from tests.support.full_size.fake_device import FakeGpu
from tests.support.full_size.micro_batches import longest_sequence, on_fake_device, pack_one, shared_prompts

KINDS = {"shared": shared_prompts, "long": longest_sequence}


def measure(settings: Settings, *, stage: int, kind: str) -> dict[str, object]:
    """Return the bytes and waits of the first rank of a pipeline stage, in the recipe's world."""
    family, size = HUB_IDS[settings.model.path]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(make_released_config(size, family=family)))
        model, settings.model.path = read_spec(Path(folder)), folder
        batch = pack_one(KINDS[kind](model, settings), model, settings)
        gpu, mode, parallel = FakeGpu(model), FakeTensorMode(allow_non_fake_inputs=True), settings.parallel
        hidden_shape = [batch.num_tokens // (parallel.tp if parallel.sequence_parallel else 1), 1, model.hidden_size]
        fake_policy.install(model, gpu, hidden_shape=hidden_shape, is_last_stage=stage == parallel.pp - 1)
        fake_kernels.install()
        world = settings.plan.world_size
        with fake_process_group(stage * world // parallel.pp, size=world), mode, gpu:
            policy, critic = build(settings, model)
            batches = [on_fake_device(batch, mode) for _ in range(parallel.pp + 1)]
            found = run(settings, policy, critic, batches, gpu)
    sizes = {"tokens": batch.num_tokens, "image_tokens": sum(image.num_tokens for image in batch.images)}
    return {**sizes, "chunks": asdict(chunk_shape(batch, model)), **found}


def chunk_shape(batch: MicroBatch, model: ModelSpec) -> ChunkShape:
    """Return how gated delta nets cut a micro-batch into chunks; the default without them."""
    if model.delta_net is None:
        return ChunkShape()
    row_NC = (plan := plan_chunks(batch.offset_S1, batch.prefix_S, model.delta_net.kernel_size)).row_NC
    return ChunkShape(
        size=row_NC.shape[1], padding=row_NC.numel() / batch.num_tokens, wave_fraction=max(plan.wave_sizes) / len(row_NC)
    )  # fmt: skip


def build(settings: Settings, model: ModelSpec) -> tuple[Policy, Critic | None]:
    """Build the policy, and the critic if it has its own backbone, as megatron_rl.build does."""
    patches, image_token_id = fake_policy.patches_of(model), model.image_token_id
    layout, num_steps, has_values = build_layout(settings.parallel, seed=0), 10, has_critic(settings)
    is_own = settings.critic.backbone == "own"
    policy = Policy(
        settings.model, layout,
        training=TrainingSettings(parallel=settings.parallel, optim=settings.optim, num_steps=num_steps, lora=settings.lora),
        special_tokens=SpecialTokens(image_token_id=image_token_id, banned_ids=[image_token_id]), temperature=settings.algo.temperature,
        keep_reference=needs_reference(settings.algo), bucket_mib=settings.engine.bucket_mib,
        critic=settings.critic if has_values and not is_own else None, patches=patches,
    )  # fmt: skip
    has_own = has_values and is_own
    return policy, build_critic(settings, layout, patches=patches, num_steps=num_steps) if has_own else None


def run(settings: Settings, policy: Policy, critic: Critic | None, batches: list[MicroBatch], gpu: FakeGpu) -> dict[str, object]:
    """Run the forward passes before an update, and an update.

    `held` is the size of parameters, gradients and optimizer state. `taken` is the peak of the
    forward and backward passes without them and without the micro-batches; the moments do not exist
    yet.
    """
    has_values = has_critic(settings)
    gpu.waits.clear()
    compute_logprobs_and_values([batches], settings, policy, critic, has_values=has_values)
    forward_waits = dict(gpu.waits)
    if has_values:
        for batch in batches:
            batch.return_T = torch.empty_like(batch.weight_T)
    columns = sum(column_bytes(batch) for batch in batches)
    gpu.reset_peak()
    gpu.waits.clear()
    make_updaters(settings, policy, critic, ALGORITHMS)(batches, 0)
    held = measure_footprint(policy.network.model, policy.network.optimizer)
    if critic is not None:
        held = held + measure_footprint(critic.network.model, critic.network.optimizer)
    before_step = held.param_bytes + held.grad_bytes + held.main_weight_bytes
    moments = 0 if settings.parallel.offload_optimizer else held.moment_bytes
    return {
        "held": before_step + moments, "resident": gpu.live - columns, "taken": gpu.backward_peak - columns - before_step,
        "waits": dict(gpu.waits), "forward_waits": forward_waits, "largest": gpu.largest.most_common(20),
    }  # fmt: skip


def column_bytes(batch: MicroBatch) -> int:
    """Return the bytes of a micro-batch on the GPU."""
    columns = [getattr(batch, each.name) for each in fields(batch)]
    return sum(column.nbytes for column in columns if isinstance(column, torch.Tensor) and column.is_cuda)


if __name__ == "__main__":
    recipe, stage, kind = sys.argv[1:]
    name, *overrides = recipe.split(",")
    print(json.dumps(measure(settings_of(f"experiment={name}", *overrides), stage=int(stage), kind=kind)))
