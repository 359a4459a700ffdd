"""User errors and hardware failures end a run with one clear error line and a non-zero exit code
within a time limit. No process and no half-written file is left behind.
"""

import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, SUPPORT, start
from tests.support import fork_server

TRAIN = ROOT / "launch" / "train.py"
TINY = (
    "task=number_line",
    "model.min_pixels=3136", "model.max_pixels=4000", "engine.kv_cache_mib=16", "task.max_turns=1", "task.max_new_tokens=4",
    "task.eval_samples=0", "batch.prompts_per_step=2", "batch.group_size=2",
)  # fmt: skip
SAID = re.compile(r"^error: (\S+?)=(\S+): (.+)$", re.MULTILINE)


def ranks(*overrides: str, within_s: float, script: Path = TRAIN) -> str:
    """Run the script on two ranks, which must exit with code 1 within `within_s` seconds and
    without a traceback. Return their output.
    """
    result = fork_server.run_world(2, script, *overrides, timeout_s=within_s)
    assert result.returncode == 1 and "Traceback" not in result.stdout, result.stdout
    return result.stdout


def together(*overrides: str, within_s: float) -> str:
    """Like `ranks`, but with two fresh processes of launch/launch.py, which must leave no worker
    running.
    """
    result = start(2, TRAIN, *overrides, timeout_s=within_s, launcher="launch/launch.py")
    assert result.returncode == 1 and "Traceback" not in result.stdout, result.stdout
    assert not processes_with(*overrides), "the launcher has ended, its workers have not"
    return result.stdout


def processes_with(*arguments: str) -> list[int]:
    """Return the ids of the processes whose command line contains all of these arguments."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if set(arguments) <= set(words):
            found.append(int(entry.parent.name))
    return found


def the_one_error(output: str) -> tuple[str, str, str]:
    """Return (key, value, remedy) of the only error line in the output."""
    (said,) = SAID.findall(output) or [None]
    assert said is not None and len(re.findall("^error:", output, re.MULTILINE)) == 1, output
    return said


@pytest.fixture
def corrupt(random_model: Path, tmp_path: Path) -> Path:
    """A copy of the random model with the second half of its weights file cut off."""
    shutil.copytree(random_model, tmp_path / "corrupt")
    weights = tmp_path / "corrupt" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    return tmp_path / "corrupt"


def test_a_misspelt_key_is_named_once(random_model: Path, tmp_path: Path) -> None:
    """The output is a single error line with a suggested key, and no run directory is created."""
    output = ranks(f"model.path={random_model}", f"run.dir={tmp_path / 'run'}", "algo.groop_size=4", within_s=120)
    assert output == "error: algo.groop_size=4: no such key; did you mean batch.group_size?\n"
    assert not (tmp_path / "run").exists()


def test_a_missing_model_is_told_once(tmp_path: Path) -> None:
    """Two ranks without the model folder print one error line, and no run directory is created."""
    overrides = ("task=number_line", f"model.path={tmp_path / 'nowhere'}", f"run.dir={tmp_path / 'run'}", "parallel.tp=2")
    key, value, remedy = the_one_error(ranks(*overrides, within_s=120))
    assert (key, value) == ("model.path", str(tmp_path / "nowhere")) and "use a Hugging Face model folder" in remedy
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("override", ["engine.kv_cache_mib=1", "engine.max_model_len=16"])
def test_an_engine_that_is_too_small(override: str, random_model: Path, tmp_path: Path) -> None:
    """The engine reports the error itself, either when it is built or at the first prompt.

    The output has exactly one error line, which names engine.max_model_len.
    """
    overrides = (*TINY, "engine.max_model_len=4096", override)
    result = fork_server.run_script(TRAIN, f"model.path={random_model}", f"run.dir={tmp_path / 'run'}", *overrides, timeout_s=120)
    assert result.returncode == 1 and len(re.findall("^error: .*engine.max_model_len.*\n$", result.stdout, re.MULTILINE)) == 1, (
        result.stdout
    )


def test_corrupt_weights_are_told_once(corrupt: Path, tmp_path: Path) -> None:
    """Every rank reads the corrupt weights after the processes have connected, but the error is
    printed once.
    """
    output = together("task=number_line", f"model.path={corrupt}", f"run.dir={tmp_path / 'run'}", within_s=120)
    assert output.splitlines()[-1].startswith("error: "), "the last word is ours"
    key, value, remedy = the_one_error(output)
    assert (key, value) == ("model.path", str(corrupt))
    assert "model.safetensors" in remedy and "corrupt" in remedy and "copy it again" in remedy


def test_a_full_disk_leaves_the_last_checkpoint_alone(random_model: Path, tmp_path: Path) -> None:
    """If saving the final model fails, the existing final folder is unchanged and no partial file
    is left. The output is one error line without warnings.
    """
    run = tmp_path / "run"
    shutil.copytree(random_model, run / "final")
    before = {path.name: path.read_bytes() for path in (run / "final").iterdir()}
    overrides = (f"model.path={random_model}", f"run.dir={run}", "run.steps=1", *TINY)
    output = ranks(*overrides, within_s=200, script=SUPPORT / "full_disk_train.py")
    key, value, remedy = the_one_error(output)
    assert (key, value) == ("run.dir", str(run)) and "File too large" in remedy and "free space" in remedy
    assert {path.name: path.read_bytes() for path in (run / "final").iterdir()} == before
    assert [path.parent.name for path in run.rglob("*.safetensors")] == ["final"], "nothing half-written beside it"
    assert "arning" not in output, "what a user cannot act on"
    assert "step 1/1" in output and not (run / "eval.json").exists()


@pytest.fixture
def two_ranks(random_model: Path, tmp_path: Path) -> Iterator[list[fork_server.Process]]:
    """Start two ranks as if on two machines, so that no torchrun ends one rank because the other
    has died.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    overrides = (f"model.path={random_model}", f"run.dir={tmp_path / 'run'}", "run.steps=500", "parallel.tp=2", *TINY)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [fork_server.Process(TRAIN, *overrides, environment={**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    yield ranks
    for rank in ranks:
        rank.kill()


@pytest.mark.known_failure("dead-rank")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_takes_the_others_with_it(victim: int, two_ranks: list[fork_server.Process], tmp_path: Path) -> None:
    """If one rank is killed in the middle of training, the other rank exits within 40 s, not only
    after parallel.timeout_s. No final checkpoint and no eval.json is written.
    """
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 150
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        assert time.monotonic() < deadline and two_ranks[0].poll() is None, two_ranks[0].communicate(timeout=5)
        time.sleep(0.2)
    two_ranks[victim].send_signal(signal.SIGKILL)
    survivor = two_ranks[1 - victim]
    output, _ = survivor.communicate(timeout=40)
    assert survivor.returncode not in (0, None), output
    assert not (tmp_path / "run" / "final").exists() and not (tmp_path / "run" / "eval.json").exists()
