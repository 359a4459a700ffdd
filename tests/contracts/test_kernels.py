"""Optional kernel packages: no requirements file or script installs apex, and Transformer Engine
has the same pin everywhere and is built by one script.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_rl.policy import kernels
from megatron_rl.preflight.check_report import CheckReport
from megatron_rl.preflight.doctor_machine import check_kernels
from tests.conftest import ROOT
from tests.contracts.test_configs import settings_of
from tests.support import fake_transformer_engine

LOCK = ROOT / "requirements" / "te.txt"


def pins(text: str) -> set[str]:
    return set(re.findall(r"transformer-engine[\w-]*==[\d.]+", text))


def test_apex_is_never_installed_by_name() -> None:
    """No file installs apex from the public index, where that name belongs to a project other than
    NVIDIA's.
    """
    files = [ROOT / "setup.py", ROOT / "pyproject.toml", *(ROOT / "requirements").glob("*.txt"), *(ROOT / "launch").rglob("*.sh")]
    files += [ROOT / "launch" / "slurm" / "Dockerfile", ROOT / ".ci" / "run"]
    named = re.compile(r"^[^#\n]*(?:^|[\s\"'\[,])(?:nvidia[-_])?apex\s*(?:[=<>~!;@\[\"',]|$)", re.MULTILINE | re.IGNORECASE)
    assert not [file.name for file in files if named.search(file.read_text())]
    for line in ("apex==0.9.10.dev0", "apex", ' "apex",', "pip install apex", "torch apex>=1", '"gpu": ["vllm", "apex"]'):
        assert named.search(line), line
    assert not named.search("# apex is never here: that name is another's") and not named.search("apexish==1")


def test_transformer_engine_is_pinned_once_and_alike() -> None:
    locked = pins(LOCK.read_text())
    assert locked == pins((ROOT / "setup.py").read_text()) and {pin.partition("==")[2] for pin in locked} == {
        fake_transformer_engine.VERSION
    }
    others = [file for file in (ROOT / "requirements").glob("*.txt") if file != LOCK]
    assert not [file.name for file in others if pins(file.read_text())]


def write_script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Create a checkout with install_te.sh, an installer that does nothing, a Python that prints
    its arguments, nvcc of CUDA 13 and g++.
    """
    for name in ("launch", "requirements", "bin", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "launch" / "install_te.sh", tmp_path / "launch")
    shutil.copy(LOCK, tmp_path / "requirements")
    (tmp_path / "requirements" / "torch.txt").write_text("# torch==1\ntorch==2.13.0\n")
    (tmp_path / "requirements" / "gpu.txt").write_text("vllm==0.32.0 \\\n    --hash=sha256:0f\n")
    write_script(tmp_path / "launch" / "install.sh", 'echo "install: $*"')
    write_script(tmp_path / ".venv" / "bin" / "python", 'case "$*" in *cudnn*) echo headers ;; *) echo "asked: $* with $CPATH" ;; esac')
    write_script(tmp_path / "bin" / "nvcc", 'echo "Cuda compilation tools, release 13.0, V13.0.88"')
    write_script(tmp_path / "bin" / "g++", "exit 0")
    for name in ("bash", "sh", "dirname", "cat", "cmp", "grep", "cp", "mv"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    return tmp_path


def install(checkout: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(checkout / "bin"), "HOME": os.environ["HOME"]}
    command = [str(checkout / "bin" / "bash"), str(checkout / "launch" / "install_te.sh")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_build_is_asked_for_once(checkout: Path) -> None:
    """The first call builds with pip without build isolation, constrained by gpu.txt, with the
    headers of gpu.txt's packages, and then checks that Megatron can use Transformer Engine. The
    second call builds nothing.
    """
    first, second = install(checkout), install(checkout)
    assert first.returncode == second.returncode == 0, first.stderr
    told, pip, check = [line for line in first.stdout.splitlines() if line.startswith(("asked", "install:"))]
    assert told == "install: gpu" and "HAVE_TE" in check
    assert "--no-build-isolation -c .venv/te.constraints -r requirements/te.txt with headers" in pip
    assert (checkout / ".venv" / "te.constraints").read_text() == "torch==2.13.0\nvllm==0.32.0\n"
    assert second.stdout.splitlines() == ["install: gpu"]


def test_what_the_build_lacks_is_named(checkout: Path) -> None:
    def refused() -> str:
        ended = install(checkout)
        assert ended.returncode == 1 and not (checkout / ".venv" / "te.stamp").exists()
        (line,) = ended.stderr.splitlines()
        return line

    write_script(checkout / ".venv" / "bin" / "python", 'case "$*" in *HAVE_TE*) exit 1 ;; esac')
    assert refused() == "install_te: error: the packages of requirements/te.txt cannot be imported with megatron-core"
    write_script(checkout / ".venv" / "bin" / "python", 'case "$*" in *cudnn*) exit 1 ;; esac')
    assert refused() == "install_te: error: the packages of requirements/gpu.txt have no headers of cuDNN and NCCL"
    (checkout / "bin" / "g++").unlink()
    assert refused().startswith("install_te: error: needs g++ to build")
    write_script(checkout / "bin" / "nvcc", 'echo "Cuda compilation tools, release 12.8, V12.8.93"')
    assert refused().startswith("install_te: error: nvcc is not from CUDA 13, for which torch is built")
    (checkout / "bin" / "nvcc").unlink()
    assert refused().startswith("install_te: error: needs nvcc of CUDA 13 to build")


def test_the_doctor_says_whose_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor reports which kernels run: here those of torch and megatron_rl. It warns if the
    installed package called apex is another project.
    """
    settings, report = settings_of("experiment=numberline_grpo_cpu", "model.path=here"), CheckReport()
    check_kernels(settings, report)
    ours = "layers: megatron_rl, norm: megatron_rl, optimizer: AdamW of torch, clipping: megatron, gradient accumulation: megatron"
    assert (report.findings, report.warnings) == ([("kernels", ours)], [])
    monkeypatch.setattr(kernels, "find_spec", lambda name: True if name == "apex" else None)
    check_kernels(settings, report)
    (warning,) = report.warnings
    assert warning.startswith("apex=unknown: is a different project with the same name, without apex.optimizers; pip uninstall apex")
    monkeypatch.setattr(kernels, "find_spec", lambda name: True if name.startswith("apex") else None)
    assert kernels.apex_error() == ""
    monkeypatch.setattr(kernels.layers, "_grad_accum_fusion_available", True)
    assert kernels.describe_kernels(settings.lora)["gradient accumulation"] == "megatron (apex's fused kernel is installed but not used)"
