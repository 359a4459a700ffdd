"""Every GPU recipe at full size, on FakeTensors of type cuda in a process group of the recipe's
size: forward passes and an update through the real policy, Megatron, packing and loss.

An operation that mixes devices raises. The waits of the host are those of a small model, and the
planned activations are between the measured peak and 110% of it. Each case runs in a process of its
own and allocates nothing for the model (tests/support/full_size).
"""

import json
from dataclasses import replace
from types import FunctionType
from typing import cast

import pytest

from megatron_rl.algo.algorithms import needs_reference
from megatron_rl.memory_plan.activations import MicroBatchSize, compute_activation_memory
from megatron_rl.memory_plan.delta_net_memory import ChunkShape
from megatron_rl.memory_plan.gpu_memory import largest_micro_batches
from megatron_rl.memory_plan.rank_shares import compute_model_shares
from megatron_rl.models.known_models import load_known_spec
from megatron_rl.policy import logprobs
from megatron_rl.registry import has_critic
from tests.contracts.test_configs import settings_of
from tests.contracts.test_recipes import RECIPES
from tests.support.cuda import launch
from tests.support.cuda.build import has_compiler
from tests.support.full_size import fake_kernels
from tests.support.update_waits import LAYER_WAITS, UPDATE_WAITS, count_by_file

CASES = [
    ("numberline_ppo_7b_h100x2", 0, "shared"), ("lewis_listener_7b_h100x4", 0, "shared"), ("vqa_3b_1gpu", 0, "shared"),
    ("visual_search_3b_lora_1gpu", 0, "shared"), ("visual_search_3b_lora_1gpu_24g", 0, "shared"),
    ("visual_search_3b_lora_1gpu_48g", 0, "shared"), ("codev_7b_l40s8", 0, "shared"), ("codev_7b_l40s8", 1, "shared"),
    ("codev_7b_lora_l40s8", 0, "shared"), ("codev_7b_lora_l40s8", 0, "long"), ("codev_7b_h200x8", 0, "shared"),
    ("codev_7b_h200x8", 0, "long"), ("pyvision_image_7b_h200x8", 0, "shared"), ("pyvision_image_7b_h200x8", 0, "long"),
    ("deepeyes_7b_h200x32", 0, "shared"), ("deepeyes_7b_h200x32", 0, "long"),
    ("qwen3_vl_30b_a3b_h200x8", 0, "shared"), ("qwen3_5_9b_h200x8", 0, "shared"),
]  # fmt: skip
"""Recipe, pipeline stage and kind of micro-batch (tests/support/full_size/micro_batches.py)."""
SAME_SHAPES = {
    "ezpoints_ppo_7b_h100x2": "numberline_ppo_7b_h100x2", "points24_ppo_7b_h100x2": "numberline_ppo_7b_h100x2",
    "blackjack_ppo_7b_h100x2": "numberline_ppo_7b_h100x2", "alfworld_ppo_7b_h100x2": "numberline_ppo_7b_h100x2",
    "lewis_speaker_7b_h100x4": "lewis_listener_7b_h100x4", "pyvision_image_7b_h200x16": "pyvision_image_7b_h200x8",
    "codev_7b_l40s32": "codev_7b_l40s8",
}  # fmt: skip
"""Recipes that are not measured: their layers and micro-batches are those of another recipe. They
differ in replicas, offloading, the objective, or the sizes of images."""


EXPERT_WAITS = {"copy to host in pipeline.py": 1} | LAYER_WAITS
"""Waits in a layer with divided experts, and one per pass in the pipeline, which exchanges the sizes
of micro-batches."""


MEASURED = {"qwen3_vl_30b_a3b_h200x8": 14_160_982_502}
"""Bytes of activations on stage 0 by recipe, as the long test below measured them on 2026-11-28."""


def planned_activations(recipe: str, *, stage: int = 0, kind: str = "shared", chunks: dict | None = None) -> tuple[MicroBatchSize, int]:
    """Return the size of a recipe's largest micro-batch of this kind, and its planned bytes.

    Gated delta nets need less memory than planned if segments are long; `chunks` states the shape
    of their chunks.
    """
    settings = settings_of(f"experiment={recipe}")
    model = load_known_spec(settings.model.path)
    size = largest_micro_batches(model, settings)[0 if kind == "shared" else 1]
    size = replace(size, chunk_shapes=(ChunkShape(**chunks),)) if chunks else size
    return size, compute_activation_memory(
        model, settings.parallel, stage=stage, size=size, max_patches=settings.model.max_pixels // model.vision.patch_size**2,
        itemsize=2, lora=settings.lora, frozen=settings.model.frozen,
    ).total_bytes  # fmt: skip


@pytest.mark.parametrize("recipe", MEASURED)
def test_the_plan_agrees_with_recorded_bytes(recipe: str) -> None:
    """A change of the plan must agree with what was measured, within 10% and never too low."""
    _, planned = planned_activations(recipe)
    assert MEASURED[recipe] <= planned <= 1.1 * MEASURED[recipe]


def test_every_recipe_has_a_case() -> None:
    measured = {recipe for recipe, _, _ in CASES}
    assert measured | SAME_SHAPES.keys() == set(RECIPES) and set(SAME_SHAPES.values()) <= measured


def test_every_compiled_function_has_a_replacement() -> None:
    """The long tests below are seldom run; a new function must not break them unnoticed."""
    assert {cast("FunctionType", function).__name__ for function in logprobs._EAGER} == fake_kernels.LOGPROB_FUNCTIONS.keys()


@pytest.mark.parametrize(("other", "recipe"), SAME_SHAPES.items())
def test_recipes_that_are_not_measured_have_equal_layers(other: str, recipe: str) -> None:
    """Model, layout, recomputation, adapters, frozen parts and largest micro-batches are equal."""
    one, two = (settings_of(f"experiment={name}") for name in (other, recipe))
    for group, keys in {
        "model": ("path", "dtype", "frozen"), "lora": ("rank", "targets"), "critic": ("backbone", "head_sizes"),
        "parallel": ("tp", "pp", "sequence_parallel", "recompute", "recompute_num_layers", "log_probs_chunk_size"),
    }.items():  # fmt: skip
        for key in keys:
            assert getattr(getattr(one, group), key) == getattr(getattr(two, group), key), key
    sizes = [max(size.num_tokens for size in largest_micro_batches(load_known_spec(each.model.path), each)) for each in (one, two)]
    assert sizes[0] == sizes[1] and has_critic(one) == has_critic(two) and needs_reference(one.algo) == needs_reference(two.algo)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not has_compiler(), reason="no g++: the recipes were NOT run on an emulated device")
@pytest.mark.parametrize(("recipe", "stage", "kind"), CASES)
def test_an_update_at_full_size(recipe: str, stage: int, kind: str) -> None:
    """Held bytes equal the plan, activations are planned within 10% and never too low, and the host
    waits as often as with a small model: once per update for each of five reasons, and never in the
    forward passes before it."""
    found = json.loads(launch.run_script("tests/support/full_size/measure.py", recipe, stage, kind, timeout_s=1700))
    settings = settings_of(f"experiment={recipe}")
    model, parallel = load_known_spec(settings.model.path), settings.parallel
    shares = compute_model_shares(model, settings, world_size=settings.plan.world_size, has_values=has_critic(settings))
    held = next(share.total_footprint for share in shares if share.pp_rank == stage)
    moments = 0 if parallel.offload_optimizer else held.moment_bytes
    assert found["held"] == held.param_bytes + held.grad_bytes + held.main_weight_bytes + moments
    size, planned = planned_activations(recipe, stage=stage, kind=kind, chunks=found["chunks"])
    assert 0.98 * size.num_tokens <= found["tokens"] <= size.num_tokens
    assert found["taken"] <= planned <= 1.1 * found["taken"]
    has_metrics = stage == parallel.pp - 1
    expected = {place: count for place, count in UPDATE_WAITS.items() if has_metrics or "loss_metrics" not in place}
    num_layers = len(model.experts.sparse_layers) if model.experts else 0
    exchanges, num_batches = EXPERT_WAITS if model.experts else {}, parallel.pp + 1
    twice = {place: (1 if "pipeline" in place else 2 * num_batches * num_layers * count) for place, count in exchanges.items()}
    assert count_by_file(found["waits"]) == expected | twice, "with full recomputation, each layer runs twice"
    once = {place: (1 if "pipeline" in place else num_batches * num_layers * count) for place, count in exchanges.items()}
    assert count_by_file(found["forward_waits"]) == once
