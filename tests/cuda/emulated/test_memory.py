"""Planned bytes against the emulated allocator's count in an update.
tests/gpu/test_memory_on_gpu.py measures the cases of a frozen vision tower with five times as many
tokens.

Compiled functions run uncompiled here, so that temporary tensors are larger than on a GPU.
"""

from pathlib import Path

import pytest

from megatron_rl.config import LoraSettings, ModelSettings, ParallelSettings
from megatron_rl.memory_plan.activations import MicroBatchSize, compute_activation_memory
from megatron_rl.models.hf_config import read_spec
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.gpu.test_memory_on_gpu import SIDE, make_sequence, measure_step
from tests.support.single_process_policy import single_process_world

LORA = LoraSettings(rank=4, targets=["attention", "mlp", "vision", "projector"])


TRAINED = {
    "all": (LoraSettings(), []), "adapters": (LORA, []), "tower": (LoraSettings(), ["language"]),
    "language": (LoraSettings(), ["vision", "merger"]),
}  # fmt: skip
"""Adapters and frozen parts by what is trained."""
CASES = [("all", "none"), ("all", "vision"), ("all", "full"), ("adapters", "full"), ("tower", "none")]
CASES += [("language", "none"), ("language", "full")]
LONG_CASES = [("adapters", "none"), ("adapters", "vision"), ("tower", "vision"), ("tower", "full")]
FAMILY_CASES = [("qwen3_5", "selective"), ("qwen3_vl_moe", "full")]
LONG_FAMILY_CASES = [("qwen3_5", "none"), ("qwen3_5", "full"), ("qwen3_vl_moe", "none"), ("qwen3_vl_moe", "selective")]
LONG_FAMILY_CASES += [("qwen3_5_moe", "full")]


@pytest.mark.parametrize(("trained", "recompute"), [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_CASES)])
def test_an_update_stays_below_the_plan_and_near_it(trained: str, recompute: str, random_model: Path) -> None:
    """Held bytes equal the plan within 5%; the additional peak never exceeds the planned
    activations.

    It is at least 45% of them, and 50%, the bound on a GPU, if only the language model is trained.
    Nearly all tokens are image tokens, as the plan assumes.
    """
    assert_near_plan(random_model, trained, recompute)


def assert_near_plan(folder: Path, trained: str, recompute: str) -> None:
    """Run an update of a model and compare its memory with the plan."""
    lora, frozen = TRAINED[trained]
    model, parallel = read_spec(folder), ParallelSettings(recompute=recompute)
    settings = ModelSettings(path=str(folder), dtype="bfloat16", frozen=frozen)
    sequence = make_sequence(model, num_images=6, num_sampled=400)
    with single_process_world():
        resident, counted, taken = measure_step(model, settings, parallel, sequences=[sequence], lora=lora)
    planned = compute_activation_memory(
        model,
        parallel,
        stage=0,
        size=MicroBatchSize.full_of_images(len(sequence.token_ids)),
        max_patches=SIDE * SIDE,
        itemsize=2,
        lora=lora,
        frozen=frozen,
    ).total_bytes
    assert resident == pytest.approx(counted, rel=0.05)
    assert (0.5 if trained == "language" else 0.45) * planned <= taken <= planned


@pytest.mark.parametrize(
    ("family", "recompute"), [*FAMILY_CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_FAMILY_CASES)]
)
def test_updates_of_other_families_stay_below_the_plan(family: str, recompute: str, tmp_path: Path) -> None:
    """Gated delta nets and layers with experts, within the same bounds. Megatron's dispatcher of
    tokens would keep their layers' inputs after an update."""
    make_checkpoint(tmp_path / family, family=family, init="random", seed=1, vision_depth=2)
    assert_near_plan(tmp_path / family, "all", recompute)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_shared_prompts_stay_below_the_plan(recompute: str, random_model: Path) -> None:
    """Seven responses of 40 tokens to a prompt of 4,108 tokens: attention gathers 7.5 keys per
    token, almost as many as the plan assumes, and its workspace grows with them."""
    model, parallel = read_spec(random_model), ParallelSettings(recompute=recompute)
    sequences = [make_sequence(model, num_images=4, num_sampled=40) for _ in range(7)]
    settings = ModelSettings(path=str(random_model), dtype="bfloat16", frozen=["vision", "merger"])
    with single_process_world():
        _, _, taken = measure_step(model, settings, parallel, sequences=sequences)
    planned = compute_activation_memory(
        model, parallel, stage=0, size=MicroBatchSize.full_of_images(4108 + 7 * 40), max_patches=SIDE * SIDE, itemsize=2,
        lora=LoraSettings(), frozen=settings.frozen,
    ).total_bytes  # fmt: skip
    assert 0.45 * planned <= taken <= planned
