"""Memory and time that the plan counts for a teacher, by hand."""

from dataclasses import replace

import pytest

from megatron_rl.config import (
    BatchSettings,
    DistillSettings,
    EngineSettings,
    LoraSettings,
    MergeSettings,
    ModelSettings,
    RunSettings,
    Settings,
    SftSettings,
    TaskSettings,
    TeacherServerSettings,
)
from megatron_rl.memory_plan.gpu_memory import _divergence_bytes
from megatron_rl.memory_plan.host_memory import plan_host_memory
from megatron_rl.memory_plan.rank_shares import compute_model_shares
from megatron_rl.models.known_models import load_known_spec

POLICY, TEACHER = "Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct"
TEACHER_PARAMS, HIDDEN, VOCABULARY = 8_292_166_656, 3584, 151_936
"""Parameters of Qwen2.5-VL-7B as its safetensors index states them, its hidden size, and the
policy's number of embedding rows."""


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_a_teacher_of_7b_for_a_policy_of_3b(tp: int, pp: int) -> None:
    """The stages together hold the teacher once (in bfloat16), apart from what tensor-parallel
    ranks hold twice, and the last stage the output layer for the policy's vocabulary."""
    settings = Settings(
        model=ModelSettings(path=POLICY, dtype="bfloat16"), run=RunSettings(dir="there"), distill=DistillSettings(teacher=TEACHER)
    )
    settings = replace(settings, parallel=replace(settings.parallel, tp=tp, pp=pp))
    shares = compute_model_shares(load_known_spec(POLICY), settings, world_size=tp * pp)
    held = sum(share.teacher_bytes for share in shares)
    assert held == 2 * TEACHER_PARAMS if tp == 1 else 1 < held / (2 * TEACHER_PARAMS) < 1.1  # the vision tower is on both ranks
    last = [share for share in shares if share.pp_rank == pp - 1]
    assert [share.teacher_output_bytes for share in last] == [2 * HIDDEN * VOCABULARY // tp] * tp
    assert pp == 1 or shares[0].teacher_output_bytes == 0
    without = replace(settings, distill=DistillSettings())
    plain = compute_model_shares(load_known_spec(POLICY), without, world_size=tp * pp)
    assert [replace(share, teacher_bytes=0, largest_teacher_bytes=0, teacher_output_bytes=0) for share in shares] == plain


def test_two_teachers_by_data_source() -> None:
    """The host holds both teachers, and the device the larger one at a time and both output layers.
    The hidden states are as large as the larger teacher's: of 512 episodes of 512 tokens."""
    settings = Settings(
        model=ModelSettings(path=POLICY, dtype="bfloat16"), run=RunSettings(dir="there"),
        distill=DistillSettings(teachers={"a": POLICY, "b": TEACHER, "c": TEACHER}),
        batch=BatchSettings(prompts_per_step=64, group_size=8), task=TaskSettings(name="vqa", max_turns=1, max_new_tokens=512),
    )  # fmt: skip
    model = load_known_spec(POLICY)
    (share,) = compute_model_shares(model, settings, world_size=1)
    assert share.largest_teacher_bytes == 2 * TEACHER_PARAMS
    assert share.teacher_bytes == 2 * (TEACHER_PARAMS + share.num_params)
    assert share.teacher_output_bytes == 2 * (HIDDEN + 2048) * VOCABULARY
    plan = plan_host_memory([share], model, settings, world_size=1, uses_sandbox=False)
    assert (plan.teacher_hidden_bytes, plan.teacher_top_bytes) == (512 * 512 * HIDDEN * 2, 0)
    servers = DistillSettings(server=TeacherServerSettings(urls=["http://one:8000"]), support="top_k", top_k=20)
    on_servers = replace(settings, distill=servers)
    plan = plan_host_memory([replace(share, teacher_output_bytes=0)], model, on_servers, world_size=1, uses_sandbox=False)
    assert (plan.teacher_hidden_bytes, plan.teacher_top_bytes) == (0, 512 * 512 * 20 * 8)
    assert plan.rank_bytes - replace(plan, teacher_top_bytes=0).rank_bytes == 512 * 512 * 20 * 8
    assert _divergence_bytes(model, on_servers, itemsize=2) == 2048 * VOCABULARY * (4 + 2 + 1)


def test_the_teachers_hidden_states_on_the_host() -> None:
    """64 episodes of up to 2 * 1,000 sampled tokens on two replicas: 32 * 2,000 rows of 3,584
    bfloat16 values; the first of two pipeline stages has none, and an estimate from the sampled
    token needs none. In stage=sft, 12 sequences of up to 4,096 tokens are on two replicas."""
    settings = Settings(
        model=ModelSettings(path=POLICY, dtype="bfloat16"), run=RunSettings(dir="there"), distill=DistillSettings(teacher=TEACHER),
        batch=BatchSettings(prompts_per_step=16, group_size=4), task=TaskSettings(name="vqa", max_turns=2, max_new_tokens=1000),
        engine=EngineSettings(max_model_len=4096), sft=SftSettings(batch_size=12),
    )  # fmt: skip
    model = load_known_spec(POLICY)

    def held(settings: Settings, *, pp: int = 1) -> list[int]:
        settings = replace(settings, parallel=replace(settings.parallel, pp=pp))
        shares = compute_model_shares(model, settings, world_size=2 * pp)
        plans = [plan_host_memory([share], model, settings, world_size=2, uses_sandbox=False) for share in shares]
        return [plan.teacher_hidden_bytes for plan in plans]

    assert held(settings) == [32 * 2000 * HIDDEN * 2]
    assert held(settings, pp=2) == [0, 32 * 2000 * HIDDEN * 2]
    assert held(replace(settings, distill=DistillSettings(teacher=TEACHER, support="sampled"))) == [0]
    assert held(replace(settings, stage="sft")) == [6 * 4096 * HIDDEN * 2]
    mixed = DistillSettings(teacher=TEACHER, data_fraction=0.2)  # 16 demonstrations of up to 4,096 tokens
    assert held(replace(settings, distill=mixed)) == [(32 * 2000 + 8 * 4096) * HIDDEN * 2]
    (share,) = compute_model_shares(model, settings, world_size=2)
    whole = plan_host_memory([share], model, settings, world_size=2, uses_sandbox=False)
    assert whole.rank_bytes - replace(whole, teacher_hidden_bytes=0).rank_bytes == 32 * 2000 * HIDDEN * 2


@pytest.mark.parametrize(("method", "state", "start"), [("ema", 4, 0), ("ties", 16, 4)])
def test_a_merge_of_the_policys_checkpoints(method: str, state: int, start: int) -> None:
    """Two replicas of a policy of 3b, of which the decoder is trained: each entry takes 4 bytes for
    every number of the merge's state and for TIES merging's start weight, and 2 bytes for the
    merged bfloat16 weights. The state is copied before it is written, by one of the replicas. The
    device holds another output layer."""
    settings = Settings(
        model=ModelSettings(path=POLICY, dtype="bfloat16", frozen=["vision", "merger"]), run=RunSettings(dir="there"),
        distill=DistillSettings(merge=MergeSettings(method=method)),
    )  # fmt: skip
    model = load_known_spec(POLICY)
    (share,), (plain,) = (
        compute_model_shares(model, each, world_size=2) for each in (settings, replace(settings, distill=DistillSettings()))
    )
    num = share.num_merged
    assert num == share.num_trained_params == plain.num_trained_params > 3e9
    assert (share.teacher_bytes, share.teacher_output_bytes) == (0, 2 * model.hidden_size * VOCABULARY)
    responses = replace(settings, distill=DistillSettings(merge=MergeSettings(method=method), apply_to="responses"))
    (generates,) = compute_model_shares(model, responses, world_size=2)
    assert generates == replace(share, teacher_output_bytes=0), "the engine is the teacher"
    host, without = (plan_host_memory([each], model, settings, world_size=2, uses_sandbox=False) for each in (share, plain))
    assert host.weight_copy_bytes - without.weight_copy_bytes == (state + start + 2) * num
    assert host.checkpoint_bytes - without.checkpoint_bytes == state * num // 2
    with_adapters = replace(settings, model=replace(settings.model, frozen=[]), lora=LoraSettings(rank=8, targets=["mlp"]))
    (adapted,) = compute_model_shares(model, with_adapters, world_size=2)
    assert adapted.num_merged == 36 * 3 * 2048 * 11_008, "gate, up and down of 36 layers"


def test_the_teachers_logits_of_a_chunk() -> None:
    """2,048 rows of the teacher's logits and of the divergence's gradient, with a mask of one byte
    per entry if there are top tokens; an estimate from the sampled token needs neither."""
    model = load_known_spec(POLICY)
    found = [
        _divergence_bytes(model, Settings(model=ModelSettings(path=POLICY), run=RunSettings(dir="there"), distill=distill), itemsize=2)
        for distill in (DistillSettings(teacher=TEACHER, **each) for each in ({}, {"support": "top_k"}, {"support": "sampled"}))
    ]
    assert found == [2048 * VOCABULARY * 4, 2048 * VOCABULARY * 5, 0]
