"""A run refuses GPUs that it cannot use, in one line and before loading a model. The values
returned by torch are planted.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config import Settings
from megatron_rl.distributed.world import World, connect
from megatron_rl.entrypoints import train
from megatron_rl.memory_plan.gpu_memory import plan_gpu_memory
from megatron_rl.models.hf_config import read_spec
from megatron_rl.preflight import run_checks
from megatron_rl.preflight.gpus import Gpu, check_gpus, driver_error, find_mismatches, read_driver_version
from megatron_rl.registry import Plugins
from tests.contracts.test_configs import settings_of
from tests.support.fake_gpus import CLOSED_MODULE, H100, L4, L40S, MIG_SLICE, OPEN_MODULE, patch_gpus

NODE = World(rank=0, size=8, local_rank=0, device=torch.device("cuda", 0), local_size=8)
ALONE = replace(NODE, size=1, local_size=1)
NEEDED = 40 * 10**9


@pytest.fixture
def settings(random_model: Path, tmp_path: Path) -> Settings:
    return settings_of("experiment=numberline_grpo_cpu", f"model.path={random_model}", f"run.dir={tmp_path}/run", "plan.gpu=h100")


def with_tp(settings: Settings, tp: int) -> Settings:
    return replace(settings, parallel=replace(settings.parallel, tp=tp))


def test_a_driver_is_read_as_its_module_says_it(tmp_path: Path) -> None:
    """The driver version is parsed from the version file of the open and the proprietary kernel
    module; it is empty if there is none.
    """
    for number, (text, found) in enumerate([(OPEN_MODULE, "580.65.06"), (CLOSED_MODULE, "535.183.01"), ("nothing of it", "")]):
        (tmp_path / str(number)).write_text(text)
        assert read_driver_version(tmp_path / str(number)) == found
    assert read_driver_version(tmp_path / "absent") == ""


def test_a_driver_that_torch_cannot_use_is_told_of() -> None:
    """If torch finds no GPU, the error states the cause: an old driver, a CPU build of torch, or
    CUDA_VISIBLE_DEVICES. With a GPU there is no error.
    """
    assert driver_error("580.65.06", "13.0", num_devices=1) == driver_error("535.183.01", "13.0", num_devices=1) == ""
    assert driver_error("535.183.01", "13.0", num_devices=0) == "driver=535.183.01: is too old for torch's CUDA 13.0; install 580 or newer"
    assert "is built for CPUs, but this machine has NVIDIA's driver 580.1" in driver_error("580.1", None, num_devices=0)
    assert driver_error("580.1", "13.0", num_devices=0).startswith("CUDA_VISIBLE_DEVICES=")


@pytest.mark.parametrize(
    ("gpus", "line"),
    [
        ([H100] * 8, ""),
        (
            [H100] * 7 + [L4],
            "CUDA_VISIBLE_DEVICES=: this node has 7 NVIDIA H100 80GB HBM3 and 1 NVIDIA L4, but all ranks need the same type;",
        ),
        (
            [MIG_SLICE] * 8,
            "CUDA_VISIBLE_DEVICES=: NVIDIA H100 80GB HBM3 MIG 1g.10gb is a slice of a GPU, but NCCL needs whole GPUs; start one",
        ),
        ([L4] * 8, "engine.gpu_memory_utilization=0.45: GPU 0 (NVIDIA L4) has 23.6 GB, but the plan needs 40.0; lower it"),
        ([L40S] * 8 + [L4], ""),
    ],
)
def test_eight_ranks_need_eight_alike(
    gpus: Sequence[Gpu], line: str, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 8 ranks need whole GPUs of the same type with enough memory. A ninth GPU that no rank
    uses does not matter.
    """
    patch_gpus(monkeypatch, tmp_path, gpus)
    assert refusal(settings, NODE, needed=NEEDED).startswith(line) and bool(line) == bool(refusal(settings, NODE, needed=NEEDED))


def refusal(settings: Settings, world: World, *, needed: int = 0) -> str:
    try:
        check_gpus(settings, world, needed=needed)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("gpus", "shared", "line"),
    [
        ([H100] * 7 + [L4], 8 << 30, "CUDA_VISIBLE_DEVICES=: this node has 7 NVIDIA H100 80GB HBM3 and 1 NVIDIA L4, but all ranks need"),
        (
            [MIG_SLICE] * 8,
            8 << 30,
            "CUDA_VISIBLE_DEVICES=: NVIDIA H100 80GB HBM3 MIG 1g.10gb is a slice of a GPU, but NCCL needs whole GPUs;",
        ),
        ([L4] * 8, 64 << 20, "/dev/shm: 0.06 GiB are free, but NCCL may need 2.0;"),
        ([L4] * 8, 8 << 30, "engine.gpu_memory_utilization=0.9: no room"),
    ],
)
def test_what_gpus_are_is_told_before_a_plan_that_fails_on_them(
    gpus: Sequence[Gpu], shared: int, line: str, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A MIG slice, or one L4 among H100s, is reported before the plan's error. The plan for the
    smallest GPU would only state that the engine has no room.
    """
    patch_gpus(monkeypatch, tmp_path, gpus, shared_bytes=shared)
    with pytest.raises(ValueError, match=f"^{re.escape(line)}"):
        run_checks.check_run(settings, Plugins(), world=NODE, needed=ValueError("engine.gpu_memory_utilization=0.9: no room"), splits=())


def test_rollouts_to_replay_need_the_mode_that_replays_them(settings: Settings) -> None:
    """rollouts.replay_from without run.mode=replay is refused, because the run would train on newly
    sampled rollouts.
    """
    settings.rollouts.replay_from = "runs/all/rollouts"
    with pytest.raises(ValueError, match=r"^rollouts.replay_from=runs/all/rollouts: .*; add run.mode=replay$"):
        run_checks.check_run(settings, Plugins(), world=ALONE, needed=0, splits=())


def test_one_rank_may_have_a_slice_that_is_large_enough(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single rank may use a MIG slice that has enough memory for the plan."""
    patch_gpus(monkeypatch, tmp_path, [MIG_SLICE])
    assert refusal(settings, ALONE, needed=10**10) == ""
    told = f"engine.gpu_memory_utilization=0.45: GPU 0 ({MIG_SLICE.name}) has 10.5 GB, but the plan needs 11.0;"
    assert refusal(settings, ALONE, needed=11 * 10**9).startswith(told)


def test_layers_are_not_cut_across_nodes(settings: Settings) -> None:
    """tp=4 is refused with nodes of two or six GPUs. It is accepted with one node of four GPUs,
    which check_layout validates.
    """
    two, six = [H100] * 2, [H100] * 6
    assert find_mismatches(with_tp(settings, 2), two, num_ranks=4) == find_mismatches(with_tp(settings, 4), [H100] * 4, num_ranks=4) == []
    for gpus, num_ranks, fitting in ((two, 4, "1, 2"), (six, 12, "1, 2")):
        (line,) = find_mismatches(with_tp(settings, 4), gpus, num_ranks=num_ranks)
        assert line == f"parallel.tp=4: would split layers across nodes of {len(gpus)} GPUs; use one of {fitting}, or parallel.pp"


def test_shared_memory_of_a_container(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks refuse Docker's default of 64 MB of shared memory, eight ranks accept the 1 GB that
    NVIDIA recommends, and one rank needs none.
    """
    pair = replace(NODE, size=2, local_size=2)
    patch_gpus(monkeypatch, tmp_path, [H100] * 8, shared_bytes=64 << 20)
    assert (
        refusal(settings, pair) == "/dev/shm: 0.06 GiB are free, but NCCL may need 0.5; start the container with --shm-size, or --ipc=host"
    )
    assert refusal(settings, ALONE) == ""
    patch_gpus(monkeypatch, tmp_path, [H100] * 8, shared_bytes=1 << 30)
    assert refusal(settings, NODE) == ""
    patch_gpus(monkeypatch, tmp_path, [H100] * 8, shared_bytes=64 << 20)
    monkeypatch.setenv("NCCL_SHM_DISABLE", "1")
    assert refusal(settings, pair) == ""


def test_a_run_that_would_take_place_on_the_cpu_unasked(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch finds no GPU although a driver is installed, the run refuses to train on the CPU:
    the driver is too old, or CUDA_VISIBLE_DEVICES names no GPU. GPUs that are hidden on purpose are
    no error.
    """
    on_cpu = replace(ALONE, device=torch.device("cpu"))
    patch_gpus(monkeypatch, tmp_path, [], driver_text=CLOSED_MODULE)
    assert refusal(settings, on_cpu) == "driver=535.183.01: is too old for torch's CUDA 13.0; install 580 or newer"
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert refusal(settings, on_cpu) == ""
    patch_gpus(monkeypatch, tmp_path, [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    assert refusal(settings, on_cpu).startswith("CUDA_VISIBLE_DEVICES=9: torch finds no GPU, but driver 580.65.06 is installed;")
    assert refusal(replace(settings, engine=replace(settings.engine, device="cpu")), on_cpu) == ""
    monkeypatch.setattr(torch.version, "cuda", None)
    assert refusal(settings, on_cpu) == ""


@pytest.mark.parametrize(
    ("gpus", "visible", "line"),
    [
        ([H100] * 2, "0,1", r"CUDA_VISIBLE_DEVICES=0,1: leaves 2 GPUs to the 8 processes on \S+; list one for each process$"),
        ([H100] * 4, None, r"--nproc_per_node=8: \S+ has 4 GPUs; start one process per GPU$"),
        (
            [MIG_SLICE],
            None,
            r"--nproc_per_node=8: on \S+ a process can use at most one slice of a GPU, here NVIDIA H100 80GB HBM3 MIG 1g.10gb;",
        ),
        ([MIG_SLICE], "MIG-1,MIG-2", r"--nproc_per_node=8: on \S+ a process can use at most one slice of a GPU"),
    ],
)
@pytest.mark.parametrize("local_rank", [0, 7])
def test_fewer_gpus_than_ranks(
    gpus: Sequence[Gpu], visible: str | None, line: str, local_rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank reports too few GPUs, including ranks that have a GPU, because they would wait for
    the other ranks.
    """
    patch_gpus(monkeypatch, tmp_path, gpus)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ValueError, match=f"^{line}"):
        connect(replace(NODE, local_rank=local_rank, device=torch.device("cuda", local_rank)), timeout_s=1)


def test_the_plan_is_made_before_ranks_meet_and_by_one_of_a_node(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The plan is made for the installed GPU even if plan.gpu names another one, because vLLM takes
    its share of the installed GPU and plan.gpu does not know every GPU type. Only local rank 0
    makes the plan, before the ranks connect; its error is raised by check_run afterwards.
    """
    patch_gpus(monkeypatch, tmp_path, [L4])
    l4 = replace(settings, plan=replace(settings.plan, gpu="l4"))
    named = plan_gpu_memory(read_spec(settings.model.path), settings, world_size=1)
    here = plan_gpu_memory(read_spec(settings.model.path), l4, world_size=1, memory=L4.memory_bytes)
    share = settings.engine.gpu_memory_utilization
    assert named.engine.budget_bytes == int(share * 80e9) and here.engine.budget_bytes == int(share * L4.memory_bytes)
    assert run_checks.plan_gpu_bytes(settings, Plugins(), world=ALONE) == here.peak_bytes < L4.memory_bytes < named.peak_bytes
    assert run_checks.plan_gpu_bytes(settings, Plugins(), world=replace(ALONE, device=torch.device("cpu"))) == 0
    lost = replace(settings, model=replace(settings.model, path="nowhere"))
    told = run_checks.plan_gpu_bytes(lost, Plugins(), world=ALONE)
    assert isinstance(told, ValueError) and str(told).startswith("model.path=nowhere: ")
    with pytest.raises(ValueError, match="^model.path=nowhere: "):  # raised here, after the ranks have connected
        run_checks.check_run(lost, Plugins(), world=ALONE, needed=told, splits=())
    assert run_checks.plan_gpu_bytes(settings, Plugins(), world=replace(NODE, local_rank=3)) == 0


@pytest.mark.parametrize(
    ("stated", "there", "line"),
    [
        (5, 10**12, "plan.host_gb=5: its 5.0 GB are less than the "),
        (1000, 5 * 10**9, "plan.host_gb=1000: this machine's 5.0 GB are less than the "),
        (1000, 10**12, ""),
        (0, 5 * 10**9, ""),
    ],
)
def test_main_memory_that_is_stated_is_a_gate(
    stated: int, there: int, line: str, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run itself, not only its dry run, refuses to start three processes on a node if they may
    need more main memory than plan.host_gb, or more than this machine has. plan.host_gb=0 turns the
    check off.
    """
    patch_gpus(monkeypatch, tmp_path, [L4] * 3)
    monkeypatch.setattr("megatron_rl.memory_plan.host_memory.psutil.virtual_memory", lambda: SimpleNamespace(total=there))
    settings = replace(settings, plan=replace(settings.plan, host_gb=stated))
    told = run_checks.plan_gpu_bytes(settings, Plugins(), world=replace(NODE, size=6, local_size=3))
    if line:
        assert isinstance(told, ValueError) and str(told).startswith(line) and "that 3 processes may need at most" in str(told)
    else:
        assert isinstance(told, int) and told > 0


def test_a_run_refuses_before_it_builds_anything(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """train.run with one rank refuses an engine that leaves too little GPU memory for the trainer.
    Nothing is built: there is no run directory and no process group.
    """

    def meet(world: World, *, timeout_s: float) -> None:
        connect(replace(world, device=torch.device("cpu")), timeout_s=timeout_s)

    settings = replace(settings, engine=replace(settings.engine, gpu_memory_utilization=0.97))
    patch_gpus(monkeypatch, tmp_path, [L4])
    planted = {
        "read_world": lambda: ALONE, "connect": meet, "expand_segments": lambda: None, "build_task": None, "build_context": None,
    }  # fmt: skip
    for name, value in planted.items():
        monkeypatch.setattr(train, name, value)
    with pytest.raises(ValueError, match=r"^engine.gpu_memory_utilization=0.97: GPU 0 \(NVIDIA L4\) has 23.6 GB, but the plan"):
        train.run(settings)
    assert not (tmp_path / "run").exists() and not torch.distributed.is_initialized()
