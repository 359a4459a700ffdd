"""The hang watchdog names the rank that blocks the others. One of three ranks sleeps, exits with an
error, stops or is killed; the reported lines are checked.
"""

import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter, Metadata

from megatron_rl.distributed.hang_watchdog import REPLY_TIMEOUT_S, HangWatchdog, RankReport, diagnose, is_waiting
from megatron_rl.distributed.world import World, is_collective_error
from megatron_rl.errors import InfraError, PeerLost, RunFailed
from tests.conftest import SUPPORT
from tests.support import fork_server

HERE = f"(node 0, {socket.gethostname()})"


def at_work(where: str, *, node: str = "node 0, a", waits: bool = False) -> RankReport:
    return RankReport(node=node, location=where, is_waiting=waits)


@pytest.mark.known_failure("silent-hang")
def test_who_lags_is_named_and_all_stacks_are_kept(tmp_path: Path) -> None:
    """Rank 1 sleeps. The other ranks report it once as a warning and once as the error that ends
    them, within the limit plus the time for replies, and the stacks of all ranks are saved.
    """
    limit_s = 10  # the warning precedes the end by a tenth of the limit
    done = fork_server.run_world(3, SUPPORT / "hang_watchdog_world.py", tmp_path, "lags", limit_s, timeout_s=100)
    assert (
        done.returncode == 1
        and time.time() - (tmp_path / "began_0").stat().st_mtime < limit_s + REPLY_TIMEOUT_S + fork_server.TERMINATE_TIMEOUT_S
    )
    last, first = sorted(line for line in done.stdout.splitlines() if "rank 1" in line)  # "error" sorts before "warning"
    behind = rf"rank 1 {re.escape(HERE)} is behind, at hang_watchdog_world.py:\d+ in sleep_long"
    why = rf"{behind}; the others wait at .*in all_gather; stacks: {tmp_path}/hang"
    assert re.fullmatch(rf"warning: rank [012] has not moved for \d+ s: {why}", first), done.stdout
    assert re.fullmatch(rf"error: parallel.timeout_s={limit_s}: a collective waited longer; {why}", last), done.stdout
    stacks = {path.name: path.read_text() for path in (tmp_path / "hang").iterdir()}
    assert stacks.keys() == {"rank_0.txt", "rank_1.txt", "rank_2.txt"} and "Traceback" not in done.stdout
    assert " in sleep_long\n" in stacks["rank_1.txt"] and " in all_gather_object\n" not in stacks["rank_1.txt"]
    assert all(
        " in all_gather_object\n" in stacks[name] and " in sleep_long\n" not in stacks[name] for name in ("rank_0.txt", "rank_2.txt")
    )


@pytest.mark.parametrize(("how", "limit_s"), [("lags", 10), ("asks", 5)])
def test_a_disk_that_hangs_does_not_hide_who_lags(tmp_path: Path, how: str, limit_s: float) -> None:
    """A rank that cannot write its stacks still answers every request, also while it reads the
    replies to its own request. A FIFO without a reader blocks like a disk that hangs.
    """
    (tmp_path / "hang").mkdir()
    os.mkfifo(tmp_path / "hang" / "rank_1.txt")
    done = fork_server.run_world(3, SUPPORT / "hang_watchdog_world.py", tmp_path, how, limit_s, timeout_s=100)
    lines = [line for line in done.stdout.splitlines() if "rank 1" in line]
    assert done.returncode == 1 and lines, done.stdout
    assert all(f"rank 1 {HERE} is behind, at hang_watchdog_world.py:" in line for line in lines) and "no response" not in done.stdout, lines


def test_who_ends_by_itself_is_quoted(tmp_path: Path) -> None:
    """The other ranks quote the error of the rank that exited at once, not after the limit, because
    on another node that rank's own output would not be visible.
    """
    done = fork_server.run_world(3, SUPPORT / "hang_watchdog_world.py", tmp_path, "ends", 60, timeout_s=100)
    assert done.returncode == 1
    assert time.time() - (tmp_path / "began_0").stat().st_mtime < 30
    (line,) = [line for line in done.stdout.splitlines() if "error" in line]
    assert line == f"error: key=value: remedy (rank 1, {HERE[1:-1]})"


def test_who_has_no_memory_left_says_so(tmp_path: Path) -> None:
    """A rank that is out of memory cannot start a thread either. Its own error is the last line,
    and no other rank reports a guess.
    """
    done = fork_server.run_world(3, SUPPORT / "hang_watchdog_world.py", tmp_path, "memory", 60, timeout_s=100)
    told = f"error: MemoryError: out of memory; give the node more memory, or lower batch.micro_batch_tokens (rank 1, {HERE[1:-1]})"
    assert [line for line in done.stdout.splitlines() if "error:" in line] == [told] and done.returncode == 1


def test_a_silent_rank_ends_the_job_wherever_it_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that does not reply to three requests, one second apart, ends the job, also within a
    group with a timeout of hours for slow writers. The default would take 100 s.
    """
    monkeypatch.setattr(fork_server, "TERMINATE_TIMEOUT_S", 1.0)
    done = fork_server.run_world(3, SUPPORT / "hang_watchdog_world.py", tmp_path, "stops", 1, timeout_s=90)
    assert done.returncode == 1 and time.time() - (tmp_path / "began_0").stat().st_mtime < 60
    line = f"error: no response from rank 1 {HERE} to 3 requests in a row; was the process stopped, or does its node hang?"
    assert [each for each in done.stdout.splitlines() if each.startswith("error")] == [line]
    warnings = [each for each in done.stdout.splitlines() if each.startswith("warning")]
    assert len(warnings) == 3 and all(f"no response from rank 1 {HERE}" in each for each in warnings), done.stdout


def test_a_slow_rank_that_answers_is_waited_for(tmp_path: Path) -> None:
    """A rank that replies but is slow, such as one that writes its part of a checkpoint for longer
    than the others, is waited for. Requests are one second apart.
    """
    done = fork_server.run_world(3, SUPPORT / "hang_watchdog_world.py", tmp_path, "writes", 1, timeout_s=90)
    assert done.returncode == 0 and "error" not in done.stdout and done.stdout.count(" in answer_slowly") >= 3, done.stdout


def keep_store(told: Connection) -> None:
    """Host the store that the ranks meet in, as a separate process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told.send(store.port)
    time.sleep(600)


def hang(first: BaseProcess) -> NoReturn:
    os.kill(first.pid, signal.SIGSTOP)
    time.sleep(1.0)  # meanwhile, the watchdog's thread sends requests
    raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 7000ms for recv operation to complete")


def test_a_first_node_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """If the first node, which hosts the store, hangs, another rank reports that and exits without
    waiting for the store, which does not reply although its connection stays open.
    """
    monkeypatch.setattr("megatron_rl.distributed.hang_watchdog.EXIT_TIMEOUT_S", 3.0)
    ours, theirs = multiprocessing.Pipe()
    first = multiprocessing.get_context("fork").Process(target=keep_store, args=[theirs])
    first.start()
    try:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(ours.recv()))
        world = World(rank=1, size=2, local_rank=1, device=torch.device("cpu"))
        with pytest.raises(PeerLost), HangWatchdog(world, folder=tmp_path, timeout_s=7.0):
            hang(first)
        said = capfd.readouterr().err
    finally:
        first.kill()
        first.join()
    time.sleep(0.5)  # the last word fails now, and nobody wants to know
    told = "error: parallel.timeout_s=7: a collective waited longer; the first node, which hosts the store of all ranks, does not respond\n"
    assert said.endswith(told) and "is not reachable" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("answers", "gone", "line"),
    [
        (
            {0: at_work("a.py:1 in f", waits=True), 1: at_work("b.py:2 in g", node="node 1, b"), 2: at_work("a.py:1 in f", waits=True)}, {},
            "rank 1 (node 1, b) is behind, at b.py:2 in g; the others wait at a.py:1 in f; stacks: hang",
        ),
        (
            {0: at_work("x", waits=True), 3: at_work("y", waits=True)}, {1: RankReport(node="n, b"), 2: RankReport(node="n, b")},
            "no response from ranks 1 and 2 (n, b); was a node lost, was memory exhausted, or were they killed?",
        ),
        (
            {0: at_work("x", waits=True), 1: RankReport(node="n", exit_reason="a=b: c")}, {2: RankReport(node="n")},
            "a=b: c (rank 1, n)",
        ),
        ({0: at_work("x"), 1: at_work("x")}, {}, "ranks 0 and 1 (node 0, a) are behind, at x; no rank waits for them; stacks: hang"),
        ({0: at_work("x", waits=True), 1: at_work("y", waits=True)}, {}, "all ranks wait for each other at x, y; stacks: hang"),
    ],
)  # fmt: skip
def test_what_is_said_of_answers(answers: dict[int, RankReport], gone: dict[int, RankReport], line: str) -> None:
    assert diagnose(answers, gone, stacks=Path("hang")) == line


def test_who_writes_a_checkpoint_waits_for_no_other(tmp_path: Path) -> None:
    """A rank in torch's own checkpoint writer, whose file is next to torch's collectives, does not
    count as waiting for others. A full FIFO simulates a disk that hangs.
    """
    os.mkfifo(tmp_path / ".metadata.tmp")
    reader = os.open(tmp_path / ".metadata.tmp", os.O_RDONLY | os.O_NONBLOCK)
    writer, metadata = FileSystemWriter(tmp_path), Metadata(state_dict_metadata={}, planner_data=bytes(1 << 20))

    def write() -> None:
        with suppress(BrokenPipeError):
            writer.finish(metadata, [])

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while True:
        frames = [(frame, line) for frame, line in traceback.walk_stack(sys._current_frames()[thread.ident])][::-1]
        if frames[-1][0].f_code.co_name == "finish":
            break
        assert thread.is_alive() and time.monotonic() < deadline
        time.sleep(0.01)
    assert "/torch/distributed/" in frames[-1][0].f_code.co_filename and not is_waiting(frames)
    os.close(reader)  # the writer then gets a BrokenPipeError
    thread.join(30)


def test_a_mistake_of_ours_is_no_collectives_failure() -> None:
    """Only network errors and gloo's RuntimeErrors count as failed collectives."""
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1"
    assert is_collective_error(RuntimeError(gloo)) and is_collective_error(dist.DistNetworkError("reset"))
    assert not any(
        map(is_collective_error, (RuntimeError("mat1 and mat2 do not fit"), ValueError(gloo), RunFailed(gloo), InfraError(gloo)))
    )
