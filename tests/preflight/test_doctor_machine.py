"""The doctor's checks of a machine: drivers, compilers, versions, disk and GPUs, each with planted
values, and the memory plan without a GPU.
"""

import shutil
import sysconfig
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config import ParallelSettings, Settings
from megatron_rl.distributed import world
from megatron_rl.preflight.check_report import CheckReport
from megatron_rl.preflight.doctor_machine import check_disk_speed, check_memory_plan, check_open_files, check_versions, check_visible_gpus
from megatron_rl.registry import Plugins
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import ROOT
from tests.contracts.test_configs import settings_of
from tests.support.fake_gpus import H100, L4, patch_gpus


@pytest.fixture
def settings(random_model: Path, tmp_path: Path) -> Settings:
    return settings_of("experiment=numberline_grpo_cpu", f"model.path={random_model}", f"run.dir={tmp_path}/run")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Plant two H100 GPUs, the second of which another process mostly uses."""
    patch_gpus(monkeypatch, tmp_path, [H100] * 2)
    cuda = SimpleNamespace(nccl=SimpleNamespace(version=lambda: (2, 29, 7)), mem_get_info=lambda index: ((80 - 70 * index) << 30, 80 << 30))
    for name, value in vars(cuda).items():
        monkeypatch.setattr(torch.cuda, name, value)


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = []
    for hard in (96, 4096):
        monkeypatch.setattr(world.resource, "getrlimit", lambda _, hard=hard: (hard, hard))
        reports.append(CheckReport())
        check_open_files(reports[-1])
    assert (reports[0].findings, reports[1].findings) == ([("open files", "not usable")], [("open files", "up to 4096 per process")])
    assert reports[0].errors[0].startswith("ulimit -n 96: a run needs at least 256 open files; raise") and reports[1].errors == []


@pytest.mark.usefixtures("gpus")
def test_gpus_that_can_be_used_are_told(settings: Settings) -> None:
    report = CheckReport()
    check_visible_gpus(settings, report)
    assert dict(report.findings) == {
        "GPUs": "NVIDIA H100 80GB HBM3 79 GiB, NVIDIA H100 80GB HBM3 79 GiB",
        "CUDA": "driver 580.65.06, torch for CUDA 13.0, NCCL 2.29.7",
    }


@pytest.mark.usefixtures("gpus")
def test_what_triton_and_nccl_lack(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 64 MiB of /dev/shm the doctor reports an error, with 128 MiB a warning. A missing C
    compiler and a missing Python.h are errors.
    """

    def has_shared(mib: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=mib << 20))

    def told() -> tuple[list[str], list[str]]:
        report = CheckReport()
        check_visible_gpus(settings, report)
        return report.errors, report.warnings

    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/clang" if name == "clang" else None)
    has_shared(1024)
    assert told() == ([], [])
    has_shared(64)
    lacking = "/dev/shm: 0.06 GiB are free, but NCCL may need 0.5; start the container with --shm-size, or --ipc=host"
    assert told() == ([lacking], [])
    has_shared(128)
    assert told() == ([], [lacking.replace("0.06", "0.12")])
    (tmp_path / "Python.h").unlink()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    compiler, headers = told()[0]
    assert compiler.startswith("PATH: contains no cc or gcc or clang") and headers.startswith(f"{tmp_path}: contains no Python.h")


def test_a_machine_without_a_gpu_says_so(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings.engine, "device", "cuda")
    report = CheckReport()
    check_visible_gpus(settings, report)
    assert (report.findings, len(report.errors)) == ([("GPUs", "none")], 1) and "no usable GPU" in report.errors[0]


def test_versions_are_held_against_the_lock(tmp_path: Path) -> None:
    """The installed versions match the lock of this environment. For a lock that differs, the first
    three packages are named; without a lock file nothing is compared.
    """
    report = CheckReport()
    check_versions([ROOT / "requirements" / name for name in ("torch.txt", "cpu.txt")], report)
    ((_, found),) = report.findings
    assert not report.warnings and found.split()[0] == found.split()[2] and int(found.split()[0]) > 100
    (tmp_path / "lock.txt").write_text("# torch==1\ntorch==2.12.0\nnone-such==1.0\nhydra-core==1.3.2\nsix_such==2\npillow==0.1\n")
    report = CheckReport()
    check_versions([tmp_path / "lock.txt"], report)
    (warning,) = report.warnings
    assert dict(report.findings)["versions"].startswith("1 of 5 match")
    assert f"torch {torch.__version__}, not 2.12.0; none-such is not installed, not 1.0; six_such" in warning
    assert warning.endswith("and 1 more; bash launch/install.sh")
    report = CheckReport()
    check_versions([tmp_path / "absent.txt"], report)
    assert report.findings == [("versions", "no lock file next to this package")] and not report.warnings


def test_a_disk_is_measured_and_left_as_it_was(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor measures the disk's speed and removes its file. A checkpoint of 2**60 bytes of
    weights gives a warning on any disk; a disk that cannot be written is an error.
    """
    report, before = CheckReport(), sorted(tmp_path.iterdir())
    assert check_disk_speed(settings, tmp_path, report, weight_bytes=1 << 20).endswith(" MB/s") and not report.warnings
    check_disk_speed(settings, tmp_path, report, weight_bytes=1 << 60)
    assert "a checkpoint takes up to" in report.warnings[0] and sorted(tmp_path.iterdir()) == before
    for error, said in ((PermissionError("no"), "cannot be written"), (OSError(28, "No space left on device"), "No space left")):

        def refuse(failure: OSError = error, **_: object) -> None:
            raise failure

        monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
        report = CheckReport()
        assert check_disk_speed(settings, tmp_path, report, weight_bytes=1) == "" and said in report.errors[0]


def test_a_named_gpu_needs_none(settings: Settings, tmp_path: Path) -> None:
    """With plan.gpu=l40s, a nano model fits if the engine uses half of the GPU, and does not fit if
    it uses 95%. Without plan.world_size, a run on CPUs has no GPU plan.
    """
    make_checkpoint(tmp_path / "wide", preset="nano", init="random", seed=0, heads=8, kv_heads=4)

    def told(*words: str) -> CheckReport:
        report = CheckReport()
        given = ("experiment=numberline_grpo_cpu", f"model.path={tmp_path}/wide", "plan.host_gb=1000", *words)
        check_memory_plan(settings_of(*given), report, Plugins())
        return report

    assert [name for name, _ in told().findings] == ["host"]
    small = told("plan.world_size=2", "plan.gpu=l40s", "engine.gpu_memory_utilization=0.5")
    assert " s per step expected on 2 l40s: rollout " in dict(small.findings)["seconds"]
    assert not small.errors and dict(small.findings)["plan"].endswith(" of the usable 43.2 GB, which is 90% of a l40s; 2 GPUs")
    full = told("plan.world_size=2", "plan.gpu=l40s", "engine.gpu_memory_utilization=0.95")
    assert full.errors[0].startswith("plan.gpu=l40s: the usable 43.2 GB (90%) are less than the required ")
    split = told("plan.world_size=2", "parallel.tp=16")
    assert split.errors and dict(split.findings)["layout"] == "not usable"


@pytest.mark.usefixtures("gpus")
def test_a_gpu_that_somebody_uses(settings: Settings) -> None:
    """The second of two GPUs has only 10 of 80 GiB free, which is less than the plan needs."""
    settings.plan.host_gb, settings.plan.gpu, settings.parallel = 1000, "h100", ParallelSettings()
    report = CheckReport()
    check_memory_plan(settings, report, Plugins())
    (error,) = report.errors
    assert error.startswith("GPU 1: 10.7 GB of its 85.9 GB are free, but the plan needs ")


@pytest.mark.usefixtures("gpus")
def test_gpus_that_do_not_go_together(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor reports the same mismatch as a run: different GPU types are an error, except with
    plan.world_size=1, which uses only the first GPU. A GPU that is too small is reported too.
    """
    patch_gpus(monkeypatch, tmp_path, [H100, L4])

    def told() -> list[str]:
        report = CheckReport()
        check_visible_gpus(settings, report)
        return [line for line in report.errors if "CUDA_VISIBLE" in line]

    (line,) = told()
    assert line.startswith("CUDA_VISIBLE_DEVICES=: this node has 1 NVIDIA H100 80GB HBM3 and 1 NVIDIA L4,")
    settings.plan.world_size = 1
    assert told() == []
    settings.plan.host_gb, settings.plan.gpu, settings.engine.gpu_memory_utilization = 1000, "h100", 0.5
    report = CheckReport()
    check_memory_plan(settings, report, Plugins())
    (line,) = report.errors
    assert line.startswith("engine.gpu_memory_utilization=0.5: GPU 1 (NVIDIA L4) has 23.6 GB, but the plan needs 4")
