"""One seed of fault injection on the smallest run, and tests of the checks themselves: each possible
defect is planted and must be detected.

The first three runs have been tested by hand with 40 seeds
(benchmarks/results/chaos_2026-11-23.md), and the later runs as well
(benchmarks/results/chaos_2026-11-26.md). test_disks.py tests the mishaps of disks.
"""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from megatron_rl.run.directory import lock
from tests.chaos.plan import LATER, LATER_MISHAPS, MISHAPS, plan
from tests.chaos.verdict import differences, given_up, left_behind, trouble_of_end, trouble_of_second
from tests.conftest import ROOT
from tests.support import fork_server

pytestmark = pytest.mark.timeout(900)
SEED = 9
"""Kills one rank, slows the same rank and stops the other one, all at once."""
RUN = "number_line"
PLANS = "bdd1a3ea38b14dc12a94f490eac2b67e3bf4f3856f88ecf66f7cdd41898dc306"
"""SHA-256 of the first 300 plans."""


def chaos(home: Path) -> subprocess.CompletedProcess[str]:
    words = ("--seeds", SEED, "--runs", RUN, "--home", home, "--out", home / "chaos.jsonl")
    return fork_server.run_script(ROOT / "tests" / "chaos" / "__main__.py", *words, timeout_s=880)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chaos")
    ended = chaos(folder)
    assert ended.returncode == 0, ended.stdout[-6000:]
    return folder


def test_a_seed(home: Path) -> None:
    """A mishap happened, the run was restarted, and it finished equal to the undisturbed run."""
    line = json.loads((home / "chaos.jsonl").read_text())
    assert line["seed"] == SEED and line["happened"] and line["is_equal"] and not line["troubles"], line
    assert len(line["lives"]) > 1, "nothing was started again"


def test_what_is_in_the_file_is_not_played_again(home: Path) -> None:
    """A second call skips the seed and leaves the output file unchanged."""
    before = (home / "chaos.jsonl").read_bytes()
    assert chaos(home).returncode == 0 and (home / "chaos.jsonl").read_bytes() == before


def test_a_seed_is_a_plan() -> None:
    """Plans of seeds that were already run (benchmarks/) do not change: their hash is pinned."""
    assert hashlib.sha256("\n".join(str(plan(seed)) for seed in range(300)).encode()).hexdigest() == PLANS


@pytest.mark.parametrize(("first", "table"), [(0, MISHAPS), (LATER, LATER_MISHAPS)])
def test_everything_happens(first: int, table: Mapping[str, tuple[str, ...]]) -> None:
    """300 seeds contain every mishap of every run, as a single mishap, as two in sequence and as
    three at once.
    """
    plans = [plan(seed) for seed in range(first, first + 300)]
    for run, mishaps in table.items():
        assert {mishap.what for each in plans if each.run == run for mishap in each.mishaps} == set(mishaps)
    assert {len(each.mishaps) for each in plans} == {1, 2, 3}
    at_once = [each.mishaps for each in plans if len(each.mishaps) == 3]
    assert all(len({(mishap.after, mishap.share) for mishap in mishaps}) == 1 for mishaps in at_once)


@pytest.fixture
def copied(home: Path, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Copy a finished run and check that no difference between the run and its copy is reported."""
    run, copy = home / "undisturbed" / RUN / "disk" / "run", tmp_path / "disk" / "run"
    shutil.copytree(run, copy)
    (tmp_path / "tmp").mkdir()
    assert differences(copy, run, has_tools=False) == left_behind(copy, tmp_path / "tmp") == given_up(copy) == []
    return copy, run


def test_one_bit_of_one_weight_is_seen(copied: tuple[Path, Path]) -> None:
    """A single flipped bit in a checkpoint or model file, and a missing file, are reported."""
    copy, run = copied
    for pattern in ("checkpoints/*/__1_0.distcp", "checkpoints/*/common.pt", "final/*.safetensors"):
        file = max(copy.glob(pattern))
        content = file.read_bytes()
        half = len(content) // 2
        file.write_bytes(content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :])
        assert differences(copy, run, has_tools=True) == [f"{file.relative_to(copy)} differs"]
        file.write_bytes(content)
    file.unlink()
    assert differences(copy, run, has_tools=True) == [f"{file.relative_to(copy)} is missing"]


def test_one_metric_of_one_step_is_seen(copied: tuple[Path, Path]) -> None:
    """A changed metric is reported at full precision.

    Engine metrics of runs with tools may differ by rounding (1e-8 passes, 1e-4 does not). A
    repeated or a missing step is reported as well.
    """
    copy, run = copied
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

    def found(*changed: dict[str, float], has_tools: bool) -> list[str]:
        (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
        return differences(copy, run, has_tools=has_tools)

    first, *others = lines
    assert found(first | {"time/total": 1e9}, *others, has_tools=False) == []
    assert found(first | {"loss": first["loss"] * (1 + 1e-15)}, *others, has_tools=True)
    gap = first["rollout_mismatch/logprob_abs_diff"]
    assert found(first | {"rollout_mismatch/logprob_abs_diff": gap + 1e-8}, *others, has_tools=True) == []
    assert found(first | {"rollout_mismatch/logprob_abs_diff": gap + 1e-8}, *others, has_tools=False)
    assert found(first | {"rollout_mismatch/logprob_abs_diff": gap + 1e-4}, *others, has_tools=True)
    assert found(*others, has_tools=True) and found(first, *lines, has_tools=True)
    found(first | {"rollout/failed_fraction": 0.05}, *others, has_tools=True)
    assert given_up(copy) == [0]


def test_what_is_left_is_seen(copied: tuple[Path, Path]) -> None:
    """A partial checkpoint, a temporary file and a lock that is still held are reported."""
    copy, _ = copied
    temporary = copy.parents[1] / "tmp"
    (copy / "checkpoints" / ".step_00000009.partial").mkdir()
    (temporary / "sandbox-1").touch()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(copy)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout.read(1) == b"h"
        found = left_behind(copy, temporary)
        holder.stdin.close()
    assert found == ["checkpoints/.step_00000009.partial is left", "the lock is still held", "TMPDIR/sandbox-1 is left"]


HOLD = f"""
import sys
from pathlib import Path
from {lock.__module__} import lock
file = lock(Path(sys.argv[1]))
print("h", end="", flush=True)
sys.stdin.read()
"""
LEAK = """
import mmap, os, subprocess, sys, time
from pathlib import Path
from tests.chaos.room import Room, descendants
room = Room()
assert descendants() == {} and room.segments() == set()
orphan = "from subprocess import *; Popen(['sleep', '60'], start_new_session=True, stdout=DEVNULL)"
subprocess.run([sys.executable, "-c", orphan], check=True)
(pid, command), = descendants().items()
assert command == "sleep 60"
assert descendants(without={pid}) == {}
if not room.lacks:
    Path("/dev/shm/left").touch()
    assert room.segments(without={os.getpid()}) == {"left"}
    os.truncate("/dev/shm/left", 1)
    held = mmap.mmap(os.open("/dev/shm/left", os.O_RDWR), 1)
    assert room.segments(without={os.getpid()}) == set() and room.segments() == {"left"}
os.kill(pid, 9)
while descendants():
    time.sleep(0.01)
print("seen", room.lacks)
"""


def test_a_process_and_a_segment_that_are_left_are_seen() -> None:
    """A process that has left its parent and its session, and a segment in /dev/shm, are both
    found.
    """
    ended = subprocess.run([sys.executable, "-c", LEAK], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.startswith("seen"), ended.stderr
    assert not Path("/dev/shm/left").exists(), "it was in a /dev/shm of its own"


GOOD = "error: run.dir=/x: could not be written ([Errno 28] No space left on device); free space or choose another folder\n"


@pytest.mark.parametrize(
    ("codes", "said", "struck", "found"),
    [
        ([0, 0], ["done", "done"], [], ""),
        ([1, 1], [GOOD, ""], [], ""),
        ([1, None], ["error: no response from rank 1 (node 0, a); was a node lost?\n", ""], [1], ""),
        ([1, -signal.SIGKILL], ["step 1\n", ""], [1], "without a word"),
        ([1, 1], [GOOD + "Traceback (most recent call last):\n", ""], [], "a traceback"),
        ([1, 1], ["error: something went wrong\n", ""], [], "neither key nor part"),
        ([0, -signal.SIGSEGV], ["done", ""], [], "exit codes"),
        ([75, 75], ["step 1\n", ""], [], "stopped without its word"),
        ([75, 75], ["stopped at step 1 of 3; the same command resumes the run\n", ""], [], ""),
        (
            [75, 75],
            ["stopped before the first step, by SIGTERM at world.py:71 in connect; the same command resumes the run\n", ""],
            [],
            "",
        ),
    ],
)
def test_how_a_life_may_end(codes: list[int | None], said: list[str], struck: list[int], found: str) -> None:
    """An attempt may end with success, a defined error line or a graceful stop.

    Tracebacks, undefined errors, silent failures and other exit codes are reported.
    """
    troubles = trouble_of_end(codes, said, struck=struck)
    assert (not troubles) if not found else (len(troubles) == 1 and found in troubles[0]), troubles


@pytest.mark.parametrize(
    ("code", "said", "found"),
    [
        (None, "step 1\n", ""),
        (0, "done", ""),
        (1, "error: engine.urls=http://a:1: cannot be used (this engine is in use by a/b); stop the run that uses this server\n", ""),
        (1, GOOD, "not refused"),
        (1, "error: something went wrong\n", "neither key nor part"),
        (-signal.SIGSEGV, "", "exit codes"),
    ],
)
def test_how_a_second_run_on_an_engine_may_end(code: int | None, said: str, found: str) -> None:
    """A second run on an engine may be active, finish, or be refused by the engine.

    Any other end is reported.
    """
    troubles = trouble_of_second(code, said)
    assert (not troubles) if not found else (len(troubles) == 1 and found in troubles[0]), troubles
