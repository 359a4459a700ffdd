"""launch/install.sh where it must refuse or repair, without a network: its lock holds one wheel, a torch of our making."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def write_wheel(folder: Path, *, cuda: str | None) -> Path:
    """A torch wheel with nothing in it but torch/version.py."""
    path = folder / "torch-9.9-py3-none-any.whl"
    files = {
        "torch/__init__.py": "raise ImportError('a CUDA build does not load here')\n",
        "torch/version.py": f"cuda = {cuda!r}\n",
        "torch-9.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n",
        "torch-9.9.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
        wheel.writestr("torch-9.9.dist-info/RECORD", "".join(f"{name},,\n" for name in files))
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the script, a lock of one CUDA wheel, and `python3.11` and an empty `nvidia-smi` first in its bin."""
    folder = tmp_path / "checkout"
    for name in ("launch", "requirements", "bin"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "launch" / "install.sh", folder / "launch")
    shutil.copy(ROOT / "setup.py", folder)
    wheel = write_wheel(tmp_path, cuda="13.0")
    (folder / "requirements" / "cpu.txt").write_text(f"# torch==9.9\n{wheel}\n")
    write_script(folder / "bin" / "python3.11", f'exec "{sys.base_prefix}/bin/python3" "$@"')
    write_script(folder / "bin" / "nvidia-smi", "exit 9")
    return folder


def write_script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def install(checkout: Path) -> subprocess.CompletedProcess[str]:
    """Run the script from a folder that is not the checkout."""
    environment = {**os.environ, "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", str(checkout / "launch" / "install.sh")]
    return subprocess.run(command, cwd=checkout.parent, env=environment, capture_output=True, text=True, timeout=200, check=False)


def test_a_cuda_torch_without_cuda_is_refused_and_the_next_run_starts_over(checkout: Path):
    first = install(checkout)
    assert first.returncode == 1
    assert "error: pip delivered torch built for CUDA 13.0, but this machine has no CUDA device" in first.stderr
    assert "CPU wheel index" in first.stderr
    assert not (checkout / ".venv" / "megatron_rl.stamp").exists()

    (checkout / ".venv" / "leftover").touch()
    second = install(checkout)
    assert "an earlier installation did not finish; starting over" in second.stdout
    assert second.returncode == 1 and not (checkout / ".venv" / "leftover").exists()


def test_a_cpu_torch_beside_a_gpu_is_refused(checkout: Path):
    write_script(checkout / "bin" / "nvidia-smi", 'echo "GPU 0: NVIDIA H200"')
    wheel = write_wheel(checkout.parent, cuda=None)
    (checkout / "requirements" / "gpu.txt").write_text(f"# torch==9.9\n{wheel}\n")
    result = install(checkout)
    assert result.returncode == 1
    assert "error: pip delivered the CPU build of torch, but this machine has a CUDA device" in result.stderr


def test_without_a_python_of_311_nothing_is_made(checkout: Path):
    for name in ("python3.11", "python3"):
        write_script(checkout / "bin" / name, "exit 1")
    result = install(checkout)
    assert result.returncode == 1
    assert "error: needs CPython 3.11" in result.stderr and "python3.11-venv" in result.stderr
    assert not (checkout / ".venv").exists()


def test_a_matching_stamp_ends_at_once_and_any_change_does_not(checkout: Path):
    interpreter = checkout / ".venv" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    write_script(interpreter, 'test "$1" = -c || { echo "asked: $*"; exit 7; }')  # a Python that cannot install
    lock, stamp = checkout / "requirements" / "cpu.txt", checkout / ".venv" / "megatron_rl.stamp"
    stamp.write_text(f"{checkout}\n{lock.read_text()}{(checkout / 'setup.py').read_text()}")
    assert (install(checkout).returncode, install(checkout).stdout) == (0, "")

    lock.write_text(lock.read_text() + "# changed\n")
    changed = install(checkout)
    assert changed.returncode == 7 and "asked: -m pip install" in changed.stdout and "starting over" not in changed.stdout
