"""The GPU and host memory plans against a real policy's storages and values computed by hand, and
rejection of runs that do not fit."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl import build, config
from megatron_rl.algo.value import make_value_objective
from megatron_rl.batching.minibatches import PackItem
from megatron_rl.config import (
    AlgoSettings,
    CriticSettings,
    EngineSettings,
    LoraSettings,
    ModelSettings,
    ParallelSettings,
    PlanSettings,
    RunSettings,
    Settings,
)
from megatron_rl.entrypoints.train import run
from megatron_rl.memory_plan import host_memory
from megatron_rl.memory_plan.activations import MicroBatchSize
from megatron_rl.memory_plan.engine_memory import EnginePlan, plan_engine
from megatron_rl.memory_plan.gpu_memory import RankMemoryPlan, largest_micro_batches, plan_gpu_memory, unplanned_bytes
from megatron_rl.memory_plan.host_memory import HostMemoryPlan
from megatron_rl.memory_plan.image_memory import plan_image_bytes
from megatron_rl.memory_plan.rank_shares import MemoryFootprint, ModelShare, compute_model_shares
from megatron_rl.memory_plan.step_time import make_step_time_inputs
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.known_models import load_known_spec
from megatron_rl.policy.network import TrainingSettings
from megatron_rl.policy.parallel import build_layout
from megatron_rl.policy.patches import patch_bytes
from megatron_rl.policy.policy import Policy
from megatron_rl.registry import has_critic
from megatron_rl.types import LossMetrics, SpecialTokens, TokenSequence
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.support.memory_footprint import measure_footprint
from tests.support.single_process_policy import close_with_world, single_process_world

KINDS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "frozen": {"dtype": "bfloat16", "frozen": ["vision", "merger"]},
    "lora": {"lora": LoraSettings(rank=4, targets=["attention", "vision"])},
    "experts": {"lora": LoraSettings(rank=8, targets=["mlp"])},
    "value head": {"critic": CriticSettings(head_sizes=[6], normalize_returns=True)},
    "own critic": {"dtype": "bfloat16", "critic": CriticSettings(backbone="own", lora=LoraSettings(rank=2))},
}


def settings_for(folder: Path, *, lora: LoraSettings | None = None, critic: CriticSettings | None = None, **model: object) -> Settings:
    return Settings(
        model=ModelSettings(path=str(folder), **model), lora=lora or LoraSettings(), run=RunSettings(dir="there"),
        algo=AlgoSettings(name="ppo" if critic else "grpo"), critic=critic or CriticSettings(),
        task=config.TaskSettings(name="number_line"), optim=config.OptimSettings(lr=1e-3),
    )  # fmt: skip


@pytest.fixture
def world() -> Iterator[None]:
    with single_process_world():
        yield


def measured(settings: Settings) -> MemoryFootprint:
    """Build policy and critic, train them for one step, and return the size of all distinct
    storages by kind."""
    layout, is_own = build_layout(settings.parallel, seed=0), settings.critic.backbone == "own"
    policy = close_with_world(Policy(
        settings.model, layout,
        training=TrainingSettings(parallel=settings.parallel, optim=settings.optim, num_steps=1, lora=settings.lora),
        special_tokens=SpecialTokens(image_token_id=7), critic=settings.critic if has_critic(settings) and not is_own else None,
    ))  # fmt: skip
    context = TokenSequence()
    context.extend([11, 12])
    context.extend([13, 14], logprobs=[0.0, 0.0])
    batches = policy.pack([PackItem(context)], max_tokens=10)
    for batch in batches:
        batch.old_value_T = batch.return_T = torch.ones_like(batch.weight_T)
    policy.update(batches, lambda rows: (-rows.logprob_R.sum(), LossMetrics(sums={}, maxima={})), step=0)
    found = measure_footprint(policy.network)
    if is_own:
        critic = close_with_world(build.build_critic(settings, layout, patches=patch_bytes, num_steps=1))
        critic.update(batches, make_value_objective(settings.critic, level="tokens"), step=0)
        found = found + measure_footprint(critic.network)
    return found


def check_held(folder: Path, kind: str, request: pytest.FixtureRequest) -> None:
    """Assert that the planned footprint equals the measured one."""
    settings = settings_for(folder, **KINDS[kind])
    (share,) = compute_model_shares(read_spec(folder), settings, world_size=1, has_values=has_critic(settings))
    request.getfixturevalue("world")
    assert share.total_footprint == measured(settings)
    assert share.total_footprint.grad_bytes >= 4 * share.num_trained_params


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_held_is_what_a_real_policy_holds(kind: str, random_model: Path, request: pytest.FixtureRequest) -> None:
    """The planned footprint equals the measured storages of a real policy and critic, for each kind
    of settings."""
    check_held(random_model, kind, request)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("others")
    for family in ("qwen2_vl", "qwen3_vl", "qwen3_5", "qwen3_vl_moe"):
        make_checkpoint(folder / family, family=family, init="random", seed=1, vision_depth=3)
    return folder


OTHERS = [
    *product(("qwen2_vl", "qwen3_vl"), ("bfloat16", "frozen", "lora", "own critic")), ("qwen3_5", "lora"), ("qwen3_vl_moe", "experts"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "kind"), OTHERS)
def test_so_does_one_of_another_family(family: str, kind: str, others: Path, request: pytest.FixtureRequest) -> None:
    """The planned footprint of another family equals the measured storages."""
    check_held(others / family, kind, request)


def test_the_optimizer_is_divided_by_the_replicas(random_model: Path) -> None:
    """The optimizer state is sharded: each of four replicas has a quarter of the padded buffer."""
    settings, model = settings_for(random_model, dtype="bfloat16"), read_spec(random_model)
    (alone,), (one,) = (compute_model_shares(model, settings, world_size=size) for size in (1, 4))
    assert (one.num_params, one.total_footprint.param_bytes) == (alone.num_params, one.total_footprint.grad_bytes // 2)
    assert one.total_footprint.main_weight_bytes <= one.total_footprint.grad_bytes // 4
    assert (
        abs(4 * one.total_footprint.main_weight_bytes - alone.total_footprint.main_weight_bytes)
        <= one.total_footprint.grad_bytes - alone.total_footprint.main_weight_bytes
    )
    assert one.total_footprint.moment_bytes == 2 * one.total_footprint.main_weight_bytes


def test_divided_experts_are_planned(tmp_path: Path) -> None:
    """With ep 2, a rank of two has half of the experts, and their gradients. The whole model has as
    many trained parameters, and as many bytes are published to servers.
    """
    make_checkpoint(tmp_path / "moe", family="qwen3_vl_moe", init="random", seed=1, vision_depth=3)
    model, plain = (
        read_spec(tmp_path / "moe"),
        replace(settings_for(tmp_path / "moe"), engine=EngineSettings(mode="server", urls=["http://h:1"])),
    )
    plans = [
        plan_gpu_memory(model, replace(plain, parallel=ParallelSettings(ep=ep), plan=PlanSettings(gpu="h100")), world_size=2)
        for ep in (1, 2)
    ]
    whole, divided = (plan.ranks[0].rank_share for plan in plans)
    half = sum(math.prod(shape) for name, shape in model.shapes().items() if ".experts." in name) // 2
    assert whole.num_params - divided.num_params == whole.num_trained_params - divided.num_trained_params == half > 0
    kinds = ("param_bytes", "grad_bytes")
    assert all(getattr(whole.total_footprint, kind) - getattr(divided.total_footprint, kind) == 4 * half for kind in kinds)
    assert divided.total_footprint.moment_bytes == pytest.approx(whole.total_footprint.moment_bytes, rel=0.01)
    assert plans[0].host.published_weight_bytes == plans[1].host.published_weight_bytes == whole.total_footprint.param_bytes
    layouts = [replace(plain, parallel=ParallelSettings(ep=ep)) for ep in (1, 2)]
    one, other = (make_step_time_inputs(model, layout, plan) for layout, plan in zip(layouts, plans, strict=True))
    assert one.num_trained_params == other.num_trained_params


def test_adapters_of_divided_experts_are_planned(tmp_path: Path) -> None:
    """With ep 2, a rank has the adapters of half of the eight experts in each of three layers. The
    whole model has as many trained parameters.
    """
    make_checkpoint(tmp_path / "moe", family="qwen3_vl_moe", init="random", seed=1, vision_depth=3)
    model, plain = read_spec(tmp_path / "moe"), settings_for(tmp_path / "moe", lora=LoraSettings(rank=8, targets=["mlp"]))
    layouts = [replace(plain, parallel=ParallelSettings(ep=ep), plan=PlanSettings(gpu="h100")) for ep in (1, 2)]
    plans = [plan_gpu_memory(model, layout, world_size=2) for layout in layouts]
    whole, divided = (plan.ranks[0].rank_share.num_trained_params for plan in plans)
    assert whole - divided == 3 * 4 * 8 * (128 + 2 * 96 + 96 + 128)
    one, other = (make_step_time_inputs(model, layout, plan) for layout, plan in zip(layouts, plans, strict=True))
    assert one.num_trained_params == other.num_trained_params == whole


def test_losses_of_routers_are_planned(others: Path) -> None:
    """Each of them adds 76 bytes per token to all four layers: 8 for each of eight experts, and
    12."""
    folder = others / "qwen3_vl_moe"
    model, plain = read_spec(folder), replace(settings_for(folder), plan=PlanSettings(gpu="h100"))
    losses = [AlgoSettings(**coef) for coef in ({}, {"router_aux_loss_coef": 1e-3}, {"router_z_loss_coef": 1e-3})]
    none, *found = (plan_gpu_memory(model, replace(plain, algo=algo), world_size=1) for algo in losses)
    added = [plan.ranks[0].activations.total_bytes - none.ranks[0].activations.total_bytes for plan in found]
    assert added == [none.num_tokens * 4 * (8 * 8 + 12)] * 2


def test_the_largest_micro_batches_by_hand() -> None:
    """Sequences of up to 1,000 tokens are packed together, so that 2,000 tokens may all be of
    images and have eight keys each. A sequence of 3,000 tokens is packed alone: three images of at
    most 401,408 pixels have 512 tokens each, and an episode of 800,000 pixels has 1,020 image
    tokens.
    """
    model = load_known_spec("Qwen/Qwen2.5-VL-7B-Instruct")

    def sizes(length: int, max_pixels: int = 0) -> list[MicroBatchSize]:
        settings = Settings(
            model=ModelSettings(max_pixels=401_408), run=RunSettings(dir="there"),
            engine=EngineSettings(max_model_len=length, max_images=3),
            batch=config.BatchSettings(micro_batch_tokens=2000), task=config.TaskSettings(name="visual_python", max_pixels=max_pixels),
        )  # fmt: skip
        return largest_micro_batches(model, settings)

    several = MicroBatchSize(num_tokens=2000, num_image_tokens=2000, kv_ratio=8)
    assert sizes(1000) == sizes(2000) == [several]
    assert sizes(3000) == [several, MicroBatchSize(num_tokens=3000, num_image_tokens=3 * 512, kv_ratio=1)]
    assert sizes(3000, 800_000)[1] == MicroBatchSize(num_tokens=3000, num_image_tokens=1020, kv_ratio=1)


@pytest.mark.parametrize("merge", [2, 4])
def test_pictures_by_hand(merge: int) -> None:
    """The engine's largest step equals a value computed by hand for the 7B model, whose patches are
    14 pixels wide. It is the vision tower's step with as many maximum-size images (1,280 tokens, or
    320 tokens of 16 patches each) as fit into 8,000 tokens, or into eight sequences."""
    model = load_known_spec("Qwen/Qwen2.5-VL-7B-Instruct")
    model = replace(model, vision=replace(model.vision, spatial_merge_size=merge))
    given = EngineSettings(dtype="bfloat16", gpu_memory_utilization=0.5, max_model_len=1000, max_num_seqs=8, max_images=1000)
    settings = Settings(
        model=ModelSettings(dtype="bfloat16"), engine=given, run=RunSettings(dir="there"),
        batch=config.BatchSettings(prompts_per_step=8, group_size=16),
    )  # fmt: skip
    planned = plan_gpu_memory(model, settings, world_size=1)
    shown = 6 * 1280 if merge == 2 else 8 * 3 * 320
    tower = merge**2 * shown * (13 * 1280 * 2 + 1176 * (4 + 2))
    assert planned.engine.step_bytes == tower + shown * 3584 * 2 + 8 * 152064 * 22 + 1_500_000_000
    assert planned.host.image_bytes == plan_image_bytes(model, settings, world_size=1) > 0


def test_an_engine_has_states_and_keys_of_attention_layers() -> None:
    """The engine of Qwen3.5-27B has keys and values of 16 layers, 4 heads of 256, for each token, and
    153,944,064 bytes of states for each of 64 sequences.
    """
    engine = EngineSettings(dtype="bfloat16", gpu_memory_utilization=0.8, max_num_seqs=64)
    settings = Settings(engine=engine, run=RunSettings(dir="there"), plan=PlanSettings(gpu="h200"))
    planned = plan_engine(load_known_spec("Qwen/Qwen3.5-27B"), settings)
    assert planned.kv_bytes_per_token == 2 * 16 * 4 * 256 * 2
    assert planned.cache_bytes == planned.budget_bytes - planned.weight_bytes - planned.step_bytes - 64 * 153_944_064


@pytest.mark.parametrize(("share", "length"), [(0.3, 4096), (0.45, 128000)])
def test_an_engine_without_room_is_refused(share: float, length: int) -> None:
    """An engine is rejected if its share of the GPU is too small.

    The 7B weights do not fit into 30% of 48 GB; with 45% (21.6 GB) one sequence of 128,000 tokens,
    7.3 GB, does not fit beside the weights.
    """
    engine = EngineSettings(dtype="bfloat16", gpu_memory_utilization=share, max_model_len=length)
    settings = Settings(engine=engine, run=RunSettings(dir="there"), plan=PlanSettings(gpu="l40s"))
    with pytest.raises(ValueError, match=rf"^engine.gpu_memory_utilization={share}: .* on a l40s is not enough .* \(16.6 GB\)"):
        plan_engine(load_known_spec("Qwen/Qwen2.5-VL-7B-Instruct"), settings)


def test_what_leaves_the_gpu_is_found_on_the_host() -> None:
    """Bytes that offloading removes from the GPU plan appear in the host plan, where pinned copies
    of the optimizer are rounded up to powers of two."""
    model = load_known_spec("Qwen/Qwen2.5-VL-3B-Instruct")

    def planned(**parallel: object) -> tuple[RankMemoryPlan, HostMemoryPlan]:
        engine = EngineSettings(dtype="bfloat16", gpu_memory_utilization=0.3)
        settings = Settings(
            model=ModelSettings(dtype="bfloat16"), parallel=ParallelSettings(recompute="full", **parallel), engine=engine,
            run=RunSettings(dir="there"),
        )  # fmt: skip
        result = plan_gpu_memory(model, settings, world_size=1)
        return result.ranks[0], result.host

    (here, host_here), (away, host_away) = planned(), planned(offload_optimizer=True, offload_params=True)
    held = here.rank_share.total_footprint
    assert here.sync_bytes - away.sync_bytes == here.optimizer_bytes - away.optimizer_bytes == held.moment_bytes
    assert here.rollout_bytes - away.rollout_bytes == held.moment_bytes + held.param_bytes + held.grad_bytes
    assert host_away.rank_bytes - host_here.rank_bytes == held.param_bytes + held.moment_bytes + 2 * sum(map(rounded, tensors_of_3b()))
    assert 1.5 < sum(map(rounded, tensors_of_3b())) / held.main_weight_bytes < 1.6


def rounded(num: int) -> int:
    """Return the bytes of `num` fp32 values in torch's pinned-memory pool, which rounds up to a
    power of two."""
    return next(1 << power for power in range(64) if 1 << power >= 4 * num)


def tensors_of_3b() -> list[int]:
    """Return the size of each tensor in Megatron's optimizer for the 3B model.

    By hand: 36 layers (q, k and v are fused, and gate and up), the tied embeddings, and the final
    norm. The vision tower's tensors are Hugging Face's.
    """
    layer = [2048 * (2048 + 2 * 256), 2048 + 2 * 256, 2048 * 2048, 2 * 11008 * 2048, 11008 * 2048, 2048, 2048]
    shapes = load_known_spec("Qwen/Qwen2.5-VL-3B-Instruct").shapes()
    return 36 * layer + [151936 * 2048, 2048] + [math.prod(shape) for name, shape in shapes.items() if name.startswith("visual.")]


def test_an_engine_elsewhere_takes_nothing_here() -> None:
    """With a remote engine, the plan contains neither the engine's share of the GPU nor its
    weights. The trainer stays on the GPU even if offload_params is set."""
    model = load_known_spec("Qwen/Qwen2.5-VL-3B-Instruct")

    def planned(**engine: object) -> tuple[RankMemoryPlan, EnginePlan]:
        settings = Settings(
            model=ModelSettings(dtype="bfloat16"), parallel=ParallelSettings(recompute="full", offload_params=True),
            engine=EngineSettings(dtype="bfloat16", gpu_memory_utilization=0.3, **engine), run=RunSettings(dir="there"),
        )  # fmt: skip
        result = plan_gpu_memory(model, settings, world_size=1)
        return result.ranks[0], result.engine

    (local, engine), (remote, _) = planned(), planned(mode="server", urls=["http://node2:8000"])
    held = local.rank_share.total_footprint
    assert local.rollout_bytes - remote.rollout_bytes == engine.budget_bytes - held.param_bytes - held.grad_bytes
    assert local.sync_bytes - remote.sync_bytes == engine.weight_bytes > 0 and local.update_bytes == remote.update_bytes


def test_a_sync_holds_two_buckets() -> None:
    """A weight sync holds two buckets: one is filled while the engine reads the other.

    A tensor larger than a bucket has its own bucket.
    """
    model = load_known_spec("Qwen/Qwen2.5-VL-3B-Instruct")

    def planned(bucket_mib: float) -> int:
        engine = EngineSettings(dtype="bfloat16", gpu_memory_utilization=0.3, bucket_mib=bucket_mib)
        settings = Settings(
            model=ModelSettings(dtype="bfloat16"), parallel=ParallelSettings(recompute="full"), engine=engine, run=RunSettings(dir="there")
        )
        return plan_gpu_memory(model, settings, world_size=1).ranks[0].sync_bytes

    assert planned(512) - planned(256) == 2 * (256 << 20)


def test_copies_of_the_weights_on_the_host_and_the_optimizers_own_on_the_gpu() -> None:
    """With a KL term, the host holds the reference weights, or the current weights while the
    reference is swapped in. AdamW's step holds the square roots of all second moments at once,
    which here exceeds the activations of micro-batches with one short sequence."""
    model = load_known_spec("Qwen/Qwen2.5-VL-3B-Instruct")
    engine = EngineSettings(dtype="bfloat16", gpu_memory_utilization=0.3, max_model_len=1024)

    def planned(stage: str = "rl", **algo: float) -> tuple[RankMemoryPlan, HostMemoryPlan]:
        settings = Settings(
            stage=stage, model=ModelSettings(dtype="bfloat16", frozen=["vision"]), parallel=ParallelSettings(recompute="full"),
            engine=engine, batch=config.BatchSettings(micro_batch_tokens=1024), algo=config.AlgoSettings(**algo),
            run=RunSettings(dir="there"),
        )  # fmt: skip
        result = plan_gpu_memory(model, settings, world_size=1)
        return result.ranks[0], result.host

    (rank, host), (_, host_kl), (_, host_sft) = planned(), planned(kl_coef=0.1), planned(stage="sft", kl_coef=0.1)
    held = rank.rank_share.total_footprint
    assert host_kl.weight_copy_bytes - host.weight_copy_bytes == held.param_bytes
    assert host_sft.weight_copy_bytes == host.weight_copy_bytes == 0
    assert rank.activations.total_bytes < held.moment_bytes // 2
    model_bytes = held.main_weight_bytes + held.moment_bytes + held.param_bytes + held.grad_bytes
    assert rank.update_bytes == 2_500_000_000 + 1_500_000_000 + model_bytes + held.moment_bytes // 2


def test_a_checkpoint_is_each_ranks_share() -> None:
    """A checkpoint takes 2 bytes of weights, 4 of main weights and 8 of moments per parameter
    (3,754,622,976 parameters), divided by the number of ranks."""
    model = load_known_spec("Qwen/Qwen2.5-VL-3B-Instruct")
    engine = EngineSettings(dtype="bfloat16", gpu_memory_utilization=0.3)
    for world_size in (1, 8):
        settings = Settings(model=ModelSettings(dtype="bfloat16"), engine=engine, run=RunSettings(dir="there"))
        host = plan_gpu_memory(model, settings, world_size=world_size).host
        assert host.checkpoint_bytes == pytest.approx(14 * 3_754_622_976 / world_size, rel=1e-4)


@pytest.mark.known_failure("memory-unknown")
def test_a_run_that_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A run that does not fit the GPU is rejected after the plan has been printed."""
    with pytest.raises(
        ValueError, match=r"^plan.gpu=l40s: the usable 43.2 GB \(90%\) are less than the required \d+\.\d GB; raise parallel.tp"
    ):
        run(plan_only(gpu="l40s", host_gb=9999.0))
    out = capsys.readouterr().out
    assert "3,754,622,976" in out and "not fit" not in out


@pytest.mark.known_failure("memory-unknown")
def test_a_host_that_does_not_hold_the_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is rejected if it needs more host memory than plan.host_gb states.

    Without plan.host_gb, the plan may be for another machine, so host memory is not judged and the
    report states this. The limit is the sum in the report's host line.
    """
    with pytest.raises(ValueError, match=r"^plan.host_gb=5.0: its 5.0 GB are less than the \d+\.\d GB that 1 process may need at most"):
        run(plan_only(gpu="h200", host_gb=5.0))
    capsys.readouterr()
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: SimpleNamespace(total=5 * 10**9))
    run(plan_only(gpu="h200", host_gb=0.0))
    *_, told, fits = capsys.readouterr().out.splitlines()
    needed = re.fullmatch(r"host memory of a node with 1 GPUs: up to (\d+\.\d GB) = 1 x .*", told)
    assert fits.startswith("fits: ") and fits.endswith("; host memory was not checked: set plan.host_gb to a node's memory")
    run(plan_only(gpu="h200", host_gb=float(needed[1].removesuffix(" GB")) + 0.1))
    assert "not " not in capsys.readouterr().out.splitlines()[-1]


def test_boxes_and_checkpoints_by_hand() -> None:
    """Sandbox and checkpoint memory on the host equal values computed by hand.

    Eight sandboxes of 1 GiB form one pool per engine, also for an engine on two ranks. A checkpoint
    is copied from the GPU, and also from the host if it is written in the background.
    """
    held = MemoryFootprint(param_bytes=100, grad_bytes=200, main_weight_bytes=400, moment_bytes=600)
    share = ModelShare(tp_rank=0, pp_rank=0, num_params=50, num_trained_params=50, policy_footprint=held, pinned_bytes=900)

    def planned(
        *, uses_sandbox: bool, tp: int = 1, background: bool = True, offload: bool = False, kind: str = "colocated"
    ) -> host_memory.HostMemoryPlan:
        sandbox = config.SandboxSettings(memory_mib=1024, size=8)
        settings = Settings(
            engine=EngineSettings(tp=tp, mode=kind, urls=["http://h:1"] if kind == "server" else []),
            task=config.TaskSettings(name="mine", sandbox=sandbox), run=RunSettings(dir="there"),
            checkpoint=config.CheckpointSettings(background=background), parallel=ParallelSettings(offload_optimizer=offload),
        )  # fmt: skip
        return host_memory.plan_host_memory(
            [share], load_known_spec("Qwen/Qwen2.5-VL-3B-Instruct"), settings, world_size=2, uses_sandbox=uses_sandbox
        )

    assert [
        planned(uses_sandbox=True).sandbox_bytes,
        planned(uses_sandbox=True, tp=2).sandbox_bytes,
        planned(uses_sandbox=False).sandbox_bytes,
    ] == [8 << 30, 4 << 30, 0]
    assert (
        planned(uses_sandbox=False).checkpoint_bytes == planned(uses_sandbox=False, background=False).checkpoint_bytes == 100 // 2 + 3 * 300
    )
    assert planned(uses_sandbox=False, background=False, offload=True).checkpoint_bytes == 100 // 2 + 300
    assert planned(uses_sandbox=False, offload=True).optimizer_bytes == 600 + 900
    whole = planned(uses_sandbox=True)
    assert (whole.published_weight_bytes, whole.node_bytes(2)) == (0, 2 * whole.rank_bytes)
    far = planned(uses_sandbox=True, kind="server")
    assert far.node_bytes(2) == 2 * far.rank_bytes + 100, "all weights once, for an engine that comes back"
    assert (
        whole.rank_bytes
        == host_memory.PROCESS_BYTES
        + whole.optimizer_bytes
        + whole.weight_copy_bytes
        + whole.checkpoint_bytes
        + whole.image_bytes
        + whole.sandbox_bytes
    )


def plan_only(**plan: object) -> Settings:
    return Settings(
        model=ModelSettings(path="Qwen/Qwen2.5-VL-3B-Instruct", dtype="bfloat16"), parallel=ParallelSettings(recompute="full"),
        engine=EngineSettings(dtype="bfloat16", gpu_memory_utilization=0.3), task=config.TaskSettings(name="number_line"),
        run=RunSettings(dir="there"), plan=PlanSettings(only=True, **plan),
    )  # fmt: skip


@pytest.mark.parametrize(("tp", "pp", "engine_tp", "groups"), [(1, 1, 1, 3), (2, 1, 1, 4), (1, 1, 2, 4), (2, 2, 2, 6)])
def test_unplanned_bytes_grow_with_the_groups_in_use(tp: int, pp: int, engine_tp: int, groups: int) -> None:
    """Unplanned memory is 1 GB for CUDA and the libraries plus 0.5 GB per process group that
    communicates."""
    settings = Settings(parallel=ParallelSettings(tp=tp, pp=pp), engine=EngineSettings(tp=engine_tp))
    assert unplanned_bytes(settings) == 1_000_000_000 + groups * 500_000_000
    divided = Settings(parallel=ParallelSettings(tp=tp, pp=pp, ep=2), engine=EngineSettings(tp=engine_tp))
    assert unplanned_bytes(divided) == unplanned_bytes(settings) + 3 * 500_000_000, "ep, tp with ep, and copies of an expert"
