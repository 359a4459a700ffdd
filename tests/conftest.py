"""Shared fixtures: tiny checkpoints that are created once per session, and a runner that starts
processes with a time limit.

Fixtures import what creates models, so that pytest-xdist's main process, which loads this file
before it starts the workers, does not import torch.
"""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import fork_server

ROOT = Path(__file__).resolve().parents[1]
SUPPORT = ROOT / "tests" / "support"
"""Test helpers, and scripts that tests run as processes."""


def pytest_configure() -> None:
    """Pause garbage collection until all test files are imported."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude imported packages from garbage collection: no collection frees them."""
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", type=Path, help="folder that the viewer's pictures in a browser are copied to")


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a nano Qwen2.5-VL checkpoint with random weights large enough that every parameter
    affects the output.
    """
    from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint

    out = tmp_path_factory.mktemp("models") / "random"
    make_checkpoint(out, preset="nano", init="random", seed=1)
    return out


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a checkpoint like random_model, but with tied embeddings."""
    from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint

    out = tmp_path_factory.mktemp("models") / "tied"
    make_checkpoint(out, preset="nano", init="random", seed=1, tied=True)
    return out


@pytest.fixture(scope="session")
def learning_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the nano checkpoint that the quickstart trains; it can learn to read."""
    from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint

    out = tmp_path_factory.mktemp("models") / "learning"
    make_checkpoint(out, preset="nano", init="learn", seed=0)
    return out


@pytest.fixture(scope="session")
def checkpoints(random_model: Path, tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Return {"untied" or "tied": (Hugging Face folder, its conversion to Megatron's format)}."""
    from megatron_rl_tools.convert import converter_hf_to_mcore

    folder = tmp_path_factory.mktemp("mcore")
    for name, model in (("untied", random_model), ("tied", tied_model)):
        assert converter_hf_to_mcore.main(["--hf", str(model), "--out", str(folder / name), "--tp", "2"]) == 0
    return {"untied": (random_model, folder / "untied"), "tied": (tied_model, folder / "tied")}


@pytest.fixture(scope="session")
def alfworld_games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create ALFWorld games; return the folder with train/, eval/ (one game of each kind) and
    words.txt.
    """
    pytest.importorskip("fast_downward", reason="without launch/install_alfworld.sh")
    from megatron_rl_tools.data import make_alfworld

    out = tmp_path_factory.mktemp("alfworld") / "games"
    assert make_alfworld.main(["--out", str(out), "--num-train", "6", "--num-eval", "6", "--processes", "2"]) == 0
    return out


@pytest.fixture(scope="session")
def torchrun():
    """Return torchrun(num_processes, script, *arguments), which starts the processes as torchrun
    would and returns their output. It fails with the output unless all processes exit with 0.
    """

    def run(num_processes: int, script: str | Path, *arguments: object, timeout_s: float = 240) -> str:
        result = fork_server.run_world(num_processes, script, *arguments, timeout_s=timeout_s)
        assert result.returncode == 0, f"{script} {arguments} exited {result.returncode}:\n{result.stdout[-6000:]}"
        return result.stdout

    return run


def start(
    num_processes: int, script: str | Path, *arguments: object, timeout_s: float, launcher: str = "-mtorch.distributed.run"
) -> subprocess.CompletedProcess[str]:
    """Run a script with torchrun itself or with this project's launcher. Standard error is merged
    into standard output. On TimeoutExpired, no process is left behind.
    """
    command = [sys.executable, launcher, "--standalone", "--nproc_per_node", str(num_processes), str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    world = subprocess.Popen(
        [*command, *map(str, arguments)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = world.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as late:
        world.terminate()  # torchrun ends its workers, after 30 s with SIGKILL; killing torchrun would orphan them
        late.output, _ = world.communicate()
        print(late.output)
        raise
    return subprocess.CompletedProcess(world.args, world.returncode, output)
