"""launch/install.sh in the cases where it must refuse or repair an installation.

No network is needed: the lock file contains one wheel, a fake torch.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def write_wheel(folder: Path, *, cuda: str | None, loads: bool = False) -> Path:
    """Write a torch wheel that contains only torch/version.py and an __init__.py.

    With `loads`, torch can be imported and reports no GPU.
    """
    path = folder / "torch-9.9-py3-none-any.whl"
    files = {
        "torch/__init__.py": "class cuda: is_available = lambda: False\n" if loads else "raise ImportError('does not load here')\n",
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
    """A folder with the script, a lock file with one CUDA wheel, and a bin folder with `python3.11`
    and a failing `nvidia-smi`, which is first in PATH.
    """
    folder = tmp_path / "checkout"
    for name in ("launch", "requirements", "bin"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "launch" / "install.sh", folder / "launch")
    shutil.copy(ROOT / "setup.py", folder)
    wheel = write_wheel(tmp_path, cuda="13.0")
    (folder / "requirements" / "torch.txt").write_text(f"# torch==9.9\n{wheel}\n")
    for name in ("cpu.txt", "gpu.txt"):
        (folder / "requirements" / name).write_text("# nothing\n")
    write_script(folder / "bin" / "python3.11", f'exec "{sys.base_prefix}/bin/python3" "$@"')
    write_script(folder / "bin" / "nvidia-smi", "exit 9")
    return folder


def write_script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def install(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the script from outside the checkout.

    The machine's pip configuration is ignored, because it may constrain the torch version.
    """
    environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", str(checkout / "launch" / "install.sh"), *words]
    return subprocess.run(command, cwd=checkout.parent, env=environment, capture_output=True, text=True, timeout=200, check=False)


def test_a_cuda_torch_without_cuda_is_refused_and_the_next_run_starts_over(checkout: Path):
    """A CUDA build of torch on a machine without a GPU is refused.

    The next run discards the unfinished installation.
    """
    first = install(checkout)
    assert first.returncode == 1
    assert "error: pip installed torch built for CUDA 13.0, but this installation is for machines without a CUDA device" in first.stderr
    assert "CPU wheel index" in first.stderr
    assert not (checkout / ".venv" / "megatron_rl.stamp").exists()

    (checkout / ".venv" / "leftover").touch()
    second = install(checkout)
    assert "an earlier installation did not finish; starting over" in second.stdout
    assert second.returncode == 1 and not (checkout / ".venv" / "leftover").exists()


def test_a_cpu_torch_beside_a_gpu_is_refused(checkout: Path):
    """A CPU build of torch on a machine with a GPU is refused."""
    write_script(checkout / "bin" / "nvidia-smi", 'echo "GPU 0: NVIDIA H200"')
    wheel = write_wheel(checkout.parent, cuda=None)
    (checkout / "requirements" / "torch.txt").write_text(f"# torch==9.9\n{wheel}\n")
    result = install(checkout)
    assert result.returncode == 1
    assert "error: pip installed the CPU build of torch, but this installation is for machines with a CUDA device" in result.stderr


def test_another_kind_of_machine_is_named(checkout: Path):
    """Container images are built on machines without a GPU.

    With the argument `gpu`, the script uses the GPU lock file and requires its build of torch; an
    unknown argument is an error.
    """
    wheel = write_wheel(checkout.parent, cuda=None)
    (checkout / "requirements" / "torch.txt").write_text(f"# torch==9.9\n{wheel}\n")
    result = install(checkout, "gpu")
    assert (
        "from requirements/torch.txt and requirements/gpu.txt" in result.stdout
        and "error: pip installed the CPU build of torch" in result.stderr
    )
    other = install(checkout, "tpu")
    assert other.returncode == 1 and "error: tpu: unknown kind of machine; use cpu or gpu" in other.stderr


def test_the_image_is_made_of_what_is_there():
    """The image of launch/slurm/Dockerfile is never built by the tests.

    This test checks that every path it copies exists, that it copies all packages of the repository
    and that it creates their links.
    """
    lines = (ROOT / "launch" / "slurm" / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    found = [path for path in ROOT.iterdir() if path.is_dir() and any(path.glob("**/*.py"))]
    packages = {path.name for path in found if not path.is_symlink()} - {"tests", "benchmarks", "shared"}
    links = {f"ln -s {path.readlink()} {path.name}" for path in found if path.is_symlink()}
    assert len(links) == 2 and any(links <= set(line.removeprefix("RUN ").split(" && ")) for line in lines)
    assert all((ROOT / word).exists() for word in copied)
    assert {path for path in packages if not path.startswith(".")} | {"requirements", "setup.py"} <= {word.split("/")[0] for word in copied}
    assert "RUN bash launch/install.sh gpu" in lines


def test_a_driver_that_is_too_old_is_named(checkout: Path):
    """With a driver that is too old, nvidia-smi works but torch sees no GPU.

    The error names the installed and the required driver version.
    """
    write_script(checkout / "bin" / "nvidia-smi", 'test "$1" = -L && echo "GPU 0: NVIDIA H200" || echo 535.183.01')
    wheel = write_wheel(checkout.parent, cuda="13.0", loads=True)
    (checkout / "requirements" / "torch.txt").write_text(f"# torch==9.9\n{wheel}\n")
    result = install(checkout)
    assert result.returncode == 1
    assert "error: torch finds no GPU: NVIDIA's driver is 535.183.01, but CUDA 13 needs 580 or newer" in result.stderr
    assert not (checkout / ".venv" / "megatron_rl.stamp").exists()


def test_what_triton_lacks_is_named_before_anything_is_made(checkout: Path):
    """The script fails before it creates a virtual environment if Python's headers or a C compiler
    is missing. For the second case, PATH contains only the tools that the script itself calls.
    """
    real = f'exec "{sys.base_prefix}/bin/python3" "$@"'
    write_script(checkout / "bin" / "python3.11", f'case "$2" in *Python.h*) exit 1 ;; *) {real} ;; esac')
    headers = install(checkout, "gpu")
    assert headers.returncode == 1 and "error: needs Python's headers" in headers.stderr, headers.stderr
    tools = checkout / "tools"
    tools.mkdir()
    for name in ("bash", "sh", "dirname", "cat", "cmp", "grep"):
        (tools / name).symlink_to(shutil.which(name))
    environment = {**os.environ, "PATH": f"{checkout / 'bin'}:{tools}"}
    command = ["bash", str(checkout / "launch" / "install.sh"), "gpu"]
    compiler = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert compiler.returncode == 1 and "error: needs a C compiler for Triton" in compiler.stderr, compiler.stderr
    assert not (checkout / ".venv").exists()


def test_without_a_python_of_311_nothing_is_made(checkout: Path):
    """Without CPython 3.11, the script fails before it creates a virtual environment."""
    for name in ("python3.11", "python3.12", "python3.13", "python3"):
        write_script(checkout / "bin" / name, "exit 1")
    result = install(checkout)
    assert result.returncode == 1
    assert "error: needs CPython 3.11" in result.stderr and "python3.11-venv" in result.stderr
    assert not (checkout / ".venv").exists()


def test_a_matching_stamp_ends_at_once_and_any_change_does_not(checkout: Path):
    """The script does nothing if the stamp file matches the lock files.

    A changed lock file starts an installation without discarding the existing one.
    """
    interpreter = checkout / ".venv" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    write_script(interpreter, 'test "$1" = -c || { echo "asked: $*"; exit 7; }')  # a Python that cannot install
    lock, stamp = checkout / "requirements" / "cpu.txt", checkout / ".venv" / "megatron_rl.stamp"
    torch = (checkout / "requirements" / "torch.txt").read_text()
    stamp.write_text(f"{checkout}\n{torch}{lock.read_text()}{(checkout / 'setup.py').read_text()}")
    assert (install(checkout).returncode, install(checkout).stdout) == (0, "")

    lock.write_text(lock.read_text() + "# changed\n")
    changed = install(checkout)
    assert changed.returncode == 7 and "asked: -m pip install" in changed.stdout and "starting over" not in changed.stdout
