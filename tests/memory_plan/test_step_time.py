"""The step time model: values computed by hand on a tiny model, scaling laws, one independent
estimate, and every constant's source."""

import ast
import inspect
import math
from dataclasses import fields, replace

import pytest

from megatron_rl.config import (
    BatchSettings,
    DistillSettings,
    EngineSettings,
    LoraSettings,
    MergeSettings,
    ModelSettings,
    ParallelSettings,
    PlanSettings,
    RunSettings,
    Settings,
    TaskSettings,
)
from megatron_rl.memory_plan import step_time_constants
from megatron_rl.memory_plan.delta_net_memory import delta_net_products
from megatron_rl.memory_plan.engine_memory import sequence_state_bytes
from megatron_rl.memory_plan.gpu_specs import GPU_SPECS, GpuSpec
from megatron_rl.memory_plan.step_time import (
    StepSeconds,
    StepTimeInputs,
    checkpoint_seconds,
    count_params,
    decode_step_seconds,
    expert_parallel_bytes,
    gradient_bytes,
    gradient_link_bytes_per_s,
    num_forward_passes_before_update,
    num_read_params,
    num_trained_tokens,
    optimizer_seconds,
    rollout_seconds,
    sync_bytes,
    tensor_parallel_bytes,
    update_flops,
    update_seconds,
    weight_sync_seconds,
)  # fmt: skip
from megatron_rl.memory_plan.step_time_constants import (
    DEFAULT_CONSTANTS,
    MEASURED_CONSTANTS,
    StepTimeConstants,
    estimate_mean_episode,
    longest_to_mean_ratio,
    sensitivity_ranges,
)
from megatron_rl.models.known_models import load_known_spec
from megatron_rl.models.model_spec import ModelSpec
from tests.contracts.test_configs import settings_of
from tests.memory_plan.test_activations import small

SEVEN = "Qwen/Qwen2.5-VL-7B-Instruct"
ROUND = StepTimeConstants(
    training_share=0.5, prefill_share=0.5, memory_share=0.5, link_share=0.5, network=10.0, network_share=0.5, host_share=0.5,
    host_memory=100.0, decode_floor_s=0.0, launch_s=0.0, tensor_s=0.0, wake_s=0.0, disk=10.0, tool_s=0.0, turns_share=1.0, reply_share=1.0,
    picture_share=1.0, prompt_tokens=6.0, spread=0.0,
)  # fmt: skip
"""Shares of one half, no overheads except the one under test, and episodes of equal length."""


@pytest.fixture(autouse=True)
def one_kind_of_gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Replace the l4 by a GPU with 100 FLOP/s, 20 bytes/s of memory, 8 bytes/s of link and 4
    bytes/s of PCIe bandwidth in tests that use `tiny`."""
    if "tiny" in request.fixturenames:
        monkeypatch.setitem(
            GPU_SPECS, "l4", GpuSpec(memory_bytes=1000, flops_per_s=100.0, hbm_bytes_per_s=20.0, link_bytes_per_s=8.0, pcie_bytes_per_s=4.0)
        )


@pytest.fixture
def tiny() -> StepTimeInputs:
    """Return inputs for four GPUs with two replicas of two tensor-parallel ranks.

    There are 2 groups of 4 episodes, each with 6 text tokens, an image of 1 token, and two
    responses of 3 tokens: 13 tokens. The model has 2 layers and, as stated by the test, 1,000
    trained parameters.
    """
    settings = Settings(
        model=ModelSettings(min_pixels=784, max_pixels=784, dtype="bfloat16"), parallel=ParallelSettings(tp=2),
        engine=EngineSettings(max_model_len=100, max_num_seqs=2, max_images=1, dtype="bfloat16"),
        batch=BatchSettings(prompts_per_step=2, group_size=4, micro_batch_tokens=100),
        task=TaskSettings(name="vqa", max_turns=2, max_new_tokens=3), run=RunSettings(dir="there"), plan=PlanSettings(gpu="l4"),
    )  # fmt: skip
    return StepTimeInputs(
        model=small(2),
        param_counts=count_params(small(2)),
        settings=settings,
        world_size=4,
        cache_tokens=10_000,
        num_trained_params=1000,
        speeds=ROUND,
    )


def with_settings(case: StepTimeInputs, **groups: dict) -> StepTimeInputs:
    """Return `case` with fields of settings groups replaced.

    Example: with_settings(case, parallel={"tp": 1})
    """
    changed = {group: replace(getattr(case.settings, group), **values) for group, values in groups.items()}
    return replace(case, settings=replace(case.settings, **changed))


def parts(case: StepTimeInputs) -> tuple[int, int]:
    """Return the number of parameters that multiply a token, and of those that multiply a patch.

    Embeddings are looked up and do not count, unless they are tied.
    """
    shapes = {name: math.prod(shape) for name, shape in case.model.shapes().items()}
    vision = sum(size for name, size in shapes.items() if "visual" in name)
    return sum(
        size for name, size in shapes.items() if "visual" not in name and (case.model.tie_word_embeddings or "embed" not in name)
    ), vision


def parameters(model: ModelSpec) -> int:
    return sum(math.prod(shape) for shape in model.shapes().values())


def test_the_mean_episode_by_hand(tiny: StepTimeInputs) -> None:
    """The mean episode equals values computed by hand; an image of 28 * 28 pixels is one token.

    If the maximum length is halved, everything shrinks except the number of turns.
    """
    assert (tiny.episode.num_turns, tiny.episode.sampled_tokens, tiny.episode.prompt_tokens, tiny.episode.total_tokens) == (2, 6, 7, 13)
    cut = with_settings(tiny, engine={"max_model_len": 6.5}).episode
    assert (cut.num_turns, cut.sampled_tokens, cut.total_tokens) == (2, 3, 6.5)


def test_a_rollout_by_hand(tiny: StepTimeInputs) -> None:
    """Decode and prefill times equal values computed by hand.

    An engine of one GPU has two of the eight episodes and two slots: six steps. A step reads the
    weights (2 bytes per multiplying parameter) and, for both sequences, 10 tokens of 2 * 2 layers *
    2 heads * 64 values of 2 bytes, at half of 20 bytes/s.

    The prompts are two of 7 tokens on four GPUs, with four patches per image, and take 2 FLOP per
    parameter at half of 100 FLOP/s.
    """
    language, vision = parts(tiny)
    step = (2 * language + 2 * 10 * 1024) / 10
    assert 2 * language * 2 / 50 < step
    assert decode_step_seconds(tiny, num_running=2) == pytest.approx(step)
    assert decode_step_seconds(with_settings(tiny, engine={"dtype": "float32"}), num_running=2) == pytest.approx(2 * step), (
        "as the engine has them"
    )
    assert decode_step_seconds(with_settings(tiny, model={"dtype": "float32"}), num_running=2) == pytest.approx(step)
    found = rollout_seconds(tiny)
    assert found["decode"] == pytest.approx(6 * step)
    assert found["prompts"] == pytest.approx(2 * (language * 14 + vision * 8) / (4 * 50))
    assert found["tools"] == 0
    waited = rollout_seconds(replace(tiny, speeds=replace(ROUND, tool_s=5.0)))
    assert waited["tools"] == 10.0, "two turns of the longest"


def test_the_longest_of_many() -> None:
    """The longest of many log-normal lengths equals its quantile by hand.

    With standard deviation 0.6, the longest of 128 lies 2.42 deviations above the mean.
    """
    assert (
        longest_to_mean_ratio(1, replace(DEFAULT_CONSTANTS, spread=0.0))
        == longest_to_mean_ratio(1000, replace(DEFAULT_CONSTANTS, spread=0.0))
        == 1.0
    )
    assert longest_to_mean_ratio(128) == pytest.approx(math.exp(0.6 * 2.421 - 0.18), rel=0.01)
    assert longest_to_mean_ratio(2048) > longest_to_mean_ratio(128)


def test_an_update_by_hand(tiny: StepTimeInputs) -> None:
    """Update times equal values computed by hand.

    A group is 7 + 4 * 6 = 31 tokens and one image of four patches. There are six FLOP per parameter
    and token, plus attention's 2 * 2 layers * 4 heads * 64 * 13 / 2; a backward pass takes twice as
    many again.
    """
    language, vision = parts(tiny)
    attention = 2 * 2 * 4 * 64 * 13 / 2
    assert num_trained_tokens(tiny) == 62
    assert update_flops(tiny, 62) == pytest.approx(62 * 6 * (language + attention) + 8 * 6 * vision)
    found = update_seconds(tiny)
    assert found["arithmetic"] == pytest.approx(update_flops(tiny, 62) / (4 * 50))
    sent = 4 * 2 * 3 * (62 / 2) * 256 * 2 / 2  # collectives * layers * passes * tokens of a replica * row in bfloat16; half is remote
    assert tensor_parallel_bytes(tiny, 62) == sent and found["tensors"] == pytest.approx(sent / 4)
    assert gradient_bytes(tiny) == 6 * 500 / 2 and found["gradients"] == pytest.approx(1500 / 4)
    assert found["optimizer"] == pytest.approx(30 * 250 / 10) and found["stages"] == 0


def test_a_part_of_the_layers_is_computed_again(tiny: StepTimeInputs) -> None:
    """If one of two layers is recomputed, the additional FLOPs are half of those of full
    recomputation, and the bytes are (3 + 1/2) / 3 of those without recomputation. On each of two
    stages with one layer, it is all of the layers."""
    half = with_settings(tiny, parallel={"recompute": "full", "recompute_num_layers": 1})
    whole = with_settings(tiny, parallel={"recompute": "full"})
    none_flops, half_flops, whole_flops = (
        update_flops(with_settings(each, model={"frozen": ["vision", "merger"]}), 62) for each in (tiny, half, whole)
    )
    assert half_flops - none_flops == pytest.approx((whole_flops - none_flops) / 2)
    assert tensor_parallel_bytes(half, 62) == pytest.approx(tensor_parallel_bytes(tiny, 62) * 3.5 / 3)
    staged = with_settings(half, parallel={"pp": 2})
    assert tensor_parallel_bytes(staged, 62) == pytest.approx(
        tensor_parallel_bytes(with_settings(staged, parallel={"recompute": "full", "recompute_num_layers": 0}), 62)
    )


def test_episodes_that_go_on_by_hand(tiny: StepTimeInputs) -> None:
    """With staleness 1, an engine has four episodes of 6 tokens in progress instead of two, and
    each may take two steps: 3 decode steps instead of 6. The eight unfinished episodes, with 6.5 of
    13 tokens and two patches each, are prefilled again."""
    wider = with_settings(tiny, engine={"max_num_seqs": 4})
    language, vision = parts(tiny)
    stale = rollout_seconds(with_settings(wider, run={"max_staleness": 1}))
    assert (
        rollout_seconds(wider)["decode"] == pytest.approx(6 * (2 * language + 2 * 10 * 1024) / 10) and not rollout_seconds(wider)["resumed"]
    )
    assert stale["decode"] == pytest.approx(3 * (2 * language + 4 * 10 * 1024) / 10)
    assert stale["resumed"] == pytest.approx(2 * (language * 52 + vision * 16) / (4 * 50))
    assert stale["prompts"] == rollout_seconds(wider)["prompts"]
    waited = replace(with_settings(wider, run={"max_staleness": 1}), speeds=replace(ROUND, tool_s=5.0))
    assert rollout_seconds(waited)["tools"] == 5.0, "half of the longest episode's two turns"


def test_sync_and_checkpoint_by_hand(tiny: StepTimeInputs) -> None:
    """Weight sync, offload and checkpoint times equal values computed by hand.

    A rank lacks half of the weights. Offloading moves everything to the host and back at 2 bytes/s.
    One node writes the weights and 12 bytes per trained parameter at 10 bytes/s.
    """
    total = parameters(tiny.model)
    assert sync_bytes(tiny) == total and weight_sync_seconds(tiny)["weights"] == pytest.approx(total / 4)
    away = with_settings(tiny, parallel={"offload_params": True})
    assert (
        weight_sync_seconds(away)["offload"] == pytest.approx(2 * (2 * total + 4000) / 2 / 2) and weight_sync_seconds(tiny)["offload"] == 0
    )
    assert checkpoint_seconds(tiny) == pytest.approx((2 * total + 12_000) / 10)


def test_the_teachers_responses_by_hand(tiny: StepTimeInputs) -> None:
    """Responses in half of the turns take half of the time of decoding and of the prompts, add half
    of the tokens, and need a second weight sync; no forward pass of the teacher is added."""
    distill = DistillSettings(merge=MergeSettings(method="ema"), apply_to="responses", response_fraction=0.5)
    case = replace(tiny, settings=replace(tiny.settings, distill=distill))
    plain, found = rollout_seconds(tiny), rollout_seconds(case)
    assert plain["teacher"] == 0
    assert found == {**plain, "teacher": 0.5 * (plain["decode"] + plain["prompts"])}
    assert num_trained_tokens(case) == 1.5 * num_trained_tokens(tiny)
    assert weight_sync_seconds(case) == {name: 2 * seconds for name, seconds in weight_sync_seconds(tiny).items()}
    assert num_forward_passes_before_update(case) == num_forward_passes_before_update(tiny)


def test_what_must_scale(tiny: StepTimeInputs) -> None:
    """Times scale as expected.

    Twice the prompts double the update and, with full slots, the rollout. Two tensor-parallel ranks
    halve the arithmetic per token. Recomputation adds a third, and adapters save a third. Twice the
    GPUs halve the arithmetic.
    """
    twice = with_settings(tiny, batch={"prompts_per_step": 4})
    assert update_seconds(twice)["arithmetic"] == pytest.approx(2 * update_seconds(tiny)["arithmetic"])
    assert update_seconds(twice)["tensors"] == pytest.approx(2 * update_seconds(tiny)["tensors"])
    assert rollout_seconds(twice)["decode"] == pytest.approx(2 * rollout_seconds(tiny)["decode"])
    full, adapters = with_settings(tiny, parallel={"recompute": "full"}), with_settings(tiny, lora={"rank": 4, "targets": ["vision"]})
    language, vision = parts(tiny)
    attention = 2 * 2 * 4 * 64 * 13 / 2
    assert update_flops(full, 62) == pytest.approx(update_flops(tiny, 62) * 8 / 6)
    assert update_flops(adapters, 62) == pytest.approx(62 * 4 * (language + attention) + 8 * 6 * vision)
    alone = replace(with_settings(tiny, parallel={"tp": 1}), world_size=2)
    assert update_seconds(replace(alone, world_size=4))["arithmetic"] == pytest.approx(update_seconds(alone)["arithmetic"] / 2)
    assert update_seconds(tiny)["arithmetic"] == pytest.approx(update_seconds(alone)["arithmetic"] / 2), "tp halves what a rank computes"
    assert tensor_parallel_bytes(alone, 62) == 0 and sync_bytes(alone) == 0
    assert rollout_seconds(with_settings(tiny, engine={"tp": 2}))["decode"] > 0


def test_stages_and_hosts(tiny: StepTimeInputs) -> None:
    """Each of two pipeline stages waits for one micro-batch of the other.

    The offloaded optimizers of a node's ranks share the bandwidth of the host's memory.
    """
    staged = with_settings(tiny, parallel={"tp": 1, "pp": 2})
    assert update_seconds(staged)["stages"] == pytest.approx(update_seconds(staged)["arithmetic"]), "one micro-batch and one that passes"
    halved = with_settings(staged, batch={"micro_batch_tokens": 31 / 4})
    assert update_seconds(halved)["stages"] == pytest.approx(
        update_seconds(halved)["arithmetic"] / (num_trained_tokens(halved) / 2 / (31 / 4))
    )
    away = with_settings(tiny, parallel={"offload_optimizer": True})
    assert optimizer_seconds(away) == pytest.approx(6 * 250 / 2 + 30 * 1000 / 100)


def test_between_nodes_the_network_counts(tiny: StepTimeInputs) -> None:
    """Gradients between nodes are limited by the network bandwidth."""
    near, far = replace(tiny, world_size=8), replace(tiny, world_size=16, speeds=replace(ROUND, network=2.0))
    assert gradient_link_bytes_per_s(near) == 4.0 and gradient_link_bytes_per_s(far) == 1.0


def test_a_micro_batch_of_7b_on_four_l40s() -> None:
    """A micro-batch of 28,672 tokens on four ranks with PCIe at 18 GB/s and full recomputation
    equals an estimate made independently of this model. Communication takes 3.8 s and arithmetic
    2.9 s, without the vision tower and attention."""
    settings = Settings(
        model=ModelSettings(path=SEVEN, dtype="bfloat16", frozen=["vision", "merger"]), run=RunSettings(dir="there"),
        plan=PlanSettings(gpu="l40s"),
        parallel=ParallelSettings(tp=4, sequence_parallel=True, recompute="full"), lora=LoraSettings(),
    )  # fmt: skip
    case = StepTimeInputs(
        model=load_known_spec(SEVEN),
        param_counts=count_params(load_known_spec(SEVEN)),
        settings=settings,
        world_size=4,
        cache_tokens=1,
        num_trained_params=1,
        speeds=replace(DEFAULT_CONSTANTS, link_share=18 / 32),
    )
    language = case.param_counts.language
    assert tensor_parallel_bytes(case, 28_672) / case.link_bytes_per_s == pytest.approx(3.8, rel=0.02)
    assert 28_672 * 8 * language / (4 * 362e12 * 0.40) == pytest.approx(2.9, rel=0.05)


def test_states_and_products_of_delta_nets_are_counted() -> None:
    """Qwen3.5-27B: 48 of 64 layers have a state of 48 heads of 128 x 128 fp32 values and three
    convolution inputs of 10,240 bfloat16 values; 16 layers have keys and values of 4 heads of 256.
    """
    model = load_known_spec("Qwen/Qwen3.5-27B")
    assert sequence_state_bytes(model, tp=1, itemsize=2) == 48 * (48 * 128 * 128 * 4 + 3 * 10_240 * 2) == 153_944_064
    assert model.num_attention_layers == 16
    by_token = 48 * (64 * (128 + 128) / 2 + 64 * 128 + 3 * 128 * 128) + 16 * 2 * 64 * 128
    assert delta_net_products(model) == 48 * by_token


def test_experts_are_counted_as_they_are_used() -> None:
    """Qwen3-VL-30B-A3B: a token computes with 8 of 128 experts of 48 layers, 3 x 2048 x 768
    parameters each. A decoding step reads them once for one sequence, and all experts for very
    many.
    """
    model = load_known_spec("Qwen/Qwen3-VL-30B-A3B-Instruct")
    counts, experts = count_params(model), 48 * 128 * 3 * 2048 * 768
    rest = 31_070_754_032 - counts.vision - 151936 * 2048 - experts
    assert counts.experts == experts and counts.language == rest + experts * 8 / 128 == pytest.approx(3.03e9, rel=0.01)
    settings = Settings(model=ModelSettings(path=SEVEN, dtype="bfloat16"), run=RunSettings(dir="there"), plan=PlanSettings(gpu="h100"))
    case = StepTimeInputs(
        model=model, param_counts=counts, settings=settings, world_size=8, cache_tokens=1, num_trained_params=1, speeds=DEFAULT_CONSTANTS
    )
    assert num_read_params(case, 1) == pytest.approx(counts.language)
    assert num_read_params(case, 2) == pytest.approx(rest + experts * (1 - (120 / 128) ** 2))
    assert num_read_params(case, 10_000) == pytest.approx(rest + experts)


def test_divided_experts_by_hand() -> None:
    """Qwen3-VL-30B-A3B with tp 2 and ep 4 on 16 ranks: eight replicas, of which two hold the same
    experts. A rank has 1/2 of the other parameters and 1/8 of the experts.
    """
    model = load_known_spec("Qwen/Qwen3-VL-30B-A3B-Instruct")
    counts, experts = count_params(model), 48 * 128 * 3 * 2048 * 768
    settings = Settings(
        model=ModelSettings(path=SEVEN, dtype="bfloat16"), run=RunSettings(dir="there"), plan=PlanSettings(gpu="h100"),
        parallel=ParallelSettings(tp=2, ep=4, sequence_parallel=True),
    )  # fmt: skip
    case = StepTimeInputs(
        model=model, param_counts=counts, settings=settings, world_size=16, cache_tokens=1, num_trained_params=counts.total,
        speeds=DEFAULT_CONSTANTS,
    )  # fmt: skip
    others = counts.total - experts
    assert gradient_bytes(case) == pytest.approx((4 + 2) * (others / 2 * 7 / 8 + experts / 8 * 1 / 2))
    assert sync_bytes(case) == pytest.approx(2 * (others / 2 + experts * 7 / 8))
    passes = 2 + num_forward_passes_before_update(case)
    assert expert_parallel_bytes(case, 800) == pytest.approx(48 * passes * 100 * 2048 * (2 + 4) * 3)
    again = expert_parallel_bytes(with_settings(case, parallel={"recompute": "full"}), 800)
    assert again == pytest.approx(expert_parallel_bytes(case, 800) * (passes + 1) / passes)
    assert expert_parallel_bytes(with_settings(case, parallel={"ep": 1}), 800) == 0
    assert update_seconds(case)["experts"] > 0
    away = weight_sync_seconds(with_settings(case, parallel={"offload_params": True}))["offload"]
    whole = weight_sync_seconds(with_settings(case, parallel={"offload_params": True, "ep": 1}))["offload"]
    assert away / whole == pytest.approx((others / 2 + experts / 8) / (counts.total / 2))


def test_every_constant_says_where_it_comes_from() -> None:
    """Every constant's docstring contains Measured, Estimate or Assumption.

    It contains Measured exactly if the constant is in MEASURED_CONSTANTS.
    """
    (made,) = [
        node
        for node in ast.parse(inspect.getsource(step_time_constants)).body
        if isinstance(node, ast.ClassDef) and node.name == "StepTimeConstants"
    ]
    told = {each.target.id: after.value.value for each, after in pairs(made)}
    assert told.keys() == {field.name for field in fields(StepTimeConstants)} == sensitivity_ranges().keys()
    for name, words in told.items():
        assert ("Measured" in words) == (name in MEASURED_CONSTANTS), name
        assert any(word in words for word in ("Measured", "Estimate", "Assumption")), name


def pairs(made: ast.ClassDef) -> list[tuple[ast.AnnAssign, ast.Expr]]:
    body = made.body[1:]  # skip the class's own docstring
    return list(zip(body[::2], body[1::2], strict=True))


def test_half_and_twice_of_every_constant() -> None:
    """Sensitivity ranges are half and twice the constant; a share is at most 1."""
    for name, (half, twice) in sensitivity_ranges().items():
        value = getattr(DEFAULT_CONSTANTS, name)
        assert half == value / 2 and value < twice <= 2 * value and (twice <= 1 or not name.endswith("_share"))


def test_a_step_is_the_sum_of_its_phases() -> None:
    """A step takes the sum of rollout, update and sync; a checkpoint is not included."""
    made = StepSeconds(rollout={"decode": 1.0, "tools": 2.0}, update={"arithmetic": 4.0}, sync={"wake": 8.0}, checkpoint=100.0)
    assert made.step_total == 15.0
    assert estimate_mean_episode(load_known_spec(SEVEN), settings_of("experiment=deepeyes_7b_h200x32")).sampled_tokens == 2048.0


def test_the_passes_before_an_update_are_paid(tiny: StepTimeInputs) -> None:
    """Forward passes before an update are counted: one for the old logprobs if there are several
    updates, one for the reference if the KL has a coefficient. Each takes 2 FLOP per parameter and
    token beside the update's 6, and one pass of tensor-parallel bytes beside 3."""
    several, reference = {"batch": {"minibatches": 2}}, {"algo": {"kl_coef": 0.1}}
    for passes, groups in ((0, {}), (1, several), (1, reference), (2, {**several, **reference})):
        case = with_settings(tiny, **groups)
        assert update_flops(case, 62) == pytest.approx(update_flops(tiny, 62) * (6 + 2 * passes) / 6)
        assert tensor_parallel_bytes(case, 62) == pytest.approx(tensor_parallel_bytes(tiny, 62) * (3 + passes) / 3)
