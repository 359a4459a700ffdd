"""Detects ranks that hang or die while other ranks wait for them, and reports the cause.

A thread on every rank watches the stack of the training thread. If the stack has not changed for
NEAR_TIMEOUT * parallel.timeout_s, the rank requests reports from all ranks. Each rank then writes
its stacks to RUN/hang/rank_N.txt. The report contains the rank's location in the code, and whether
the rank is waiting in a collective. A warning names the ranks that are not waiting.

The run ends with one error line per node if a collective fails because of a timeout or a dead rank,
or if a rank misses MAX_MISSED_REPLIES requests in a row. A rank that is only slow still replies.
Ranks communicate through a TCPStore at torchrun's rendezvous address. On CUDA, if PyTorch's NCCL
watchdog ends a process after a timeout, the PyTorch Flight Recorder writes the process's last NCCL
collectives to RUN/hang. The use of the Flight Recorder has not been tested.
"""

import faulthandler
import json
import linecache
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import product
from math import ceil
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, Self

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  torch documents this class; its types omit the export

from megatron_rl.distributed.world import World, first_line, is_collective_error, round_up_to_minutes
from megatron_rl.errors import PeerLost

FOLDER = "hang"
"""Name of the run directory's subfolder for stack files."""
NEAR_TIMEOUT = 0.9
"""Fraction of the timeout after which reports are requested. The fraction is below 1, because NCCL
ends a process at the timeout, and an ended process cannot report.
"""
POLLS_PER_TIMEOUT, POLL_S = 20, 0.5
"""Number of polls per timeout, and maximum interval between two polls in seconds."""
REPLY_TIMEOUT_S = 5.0
"""Seconds within which ranks must reply to a request. A rank that does not reply counts as gone."""
STACK_WRITE_TIMEOUT_S = 1.0
"""Maximum seconds to wait for the stacks to be written before a report is sent."""
EXIT_TIMEOUT_S = 6 * REPLY_TIMEOUT_S
"""Maximum seconds for publishing the final report. The limit is needed because a request to the
store can block forever if the process that hosts the store hangs. The request's own timeout does
not prevent this: after the timeout, torch 2.13's TCPStore waits for a reply to the cancellation of
the request.
"""
MAX_MISSED_REPLIES = 3
"""Number of consecutive requests that a rank must miss before the run is ended. The run is ended
even if parallel.straggler_timeout_s has not yet expired.
"""
_NO_REQUEST, _END_ALL = "0 nobody", "over"
"""Special values of the request key in the store: the value before the first request, and the value
that makes all ranks exit. All other values consist of a request's number and sender.
"""
_PACKAGE = Path(__file__).parents[1]
_WAIT_HELPERS = (Path(__file__), _PACKAGE / "distributed/world.py")


@dataclass(slots=True, frozen=True, kw_only=True)
class RankReport:
    """Report of a rank, published on request or when the rank exits."""

    node: str
    location: str = ""
    """Line of code that the rank is executing."""
    is_waiting: bool = False
    """True if the rank waits for other ranks in a collective."""
    exit_reason: str = ""
    """Reason for the rank's exit; empty if the rank has not exited or if a collective failed."""


class HangWatchdog:
    """Context manager that runs the watchdog on a rank while the run uses collectives.

    Create the watchdog before the process group. In a world of size 1, the watchdog does nothing.
    """

    def __init__(self, world: World, *, folder: Path, timeout_s: float) -> None:
        self._world, self._folder, self._timeout_s = world, folder / FOLDER, timeout_s
        self._node = f"node {world.node}, {socket.gethostname()}"
        self._is_leaving, self._given_up = threading.Event(), threading.Event()
        self._writer: threading.Thread | None = None
        self._thread = threading.Thread(target=self._watch_and_exit, name="watch", daemon=True)
        if world.device.type == "cuda":
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
            os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(self._folder.absolute() / "nccl_"))

    def __enter__(self) -> Self:
        self._watched = threading.get_ident()
        if self._world.size > 1:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            patience = timedelta(seconds=REPLY_TIMEOUT_S)
            self._store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=patience)
            self._last_request = self._store.compare_set("watch/asked", "", _NO_REQUEST)
            self._publish_report("here", RankReport(node=self._node))
            self._store.set(f"watch/heard/{self._world.rank}", str(_request_number(self._last_request)))
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Publish this rank's last report; raise PeerLost if a collective failed."""
        if self._world.size == 1:
            return
        parts = error is not None and is_collective_error(error)
        self._leave_fn = partial(self._exit_with_reason, error, trace, parts)
        self._is_leaving.set()
        self._thread.join(EXIT_TIMEOUT_S)
        if self._thread.is_alive() and parts:
            assert error is not None
            self._given_up.set()
            _print_to_stderr(f"error: {self._exceeded_timeout(error)}the first node, which hosts the store of all ranks, does not respond")
        if parts:
            raise PeerLost from error

    def _watch_and_exit(self) -> None:
        """Run the watch loop, then publish this rank's last report.

        The report is published from this thread, because starting a new thread may fail if memory
        is low.
        """
        self._watch()
        self._is_leaving.wait()
        self._leave_fn()

    def _exit_with_reason(self, error: BaseException | None, trace: TracebackType | None, parts: bool) -> None:
        """Publish this rank's last report; after a failed collective, also print the diagnosis."""
        try:
            if parts:
                assert error is not None
                self._publish_report(
                    "last", RankReport(node=self._node, location=innermost_place(list(traceback.walk_tb(trace))), is_waiting=True)
                )
                self._report_failure(error)
            else:
                self._publish_report("last", RankReport(node=self._node, exit_reason=exit_reason(error)))
        except dist.DistError as lost:
            if parts and not self._given_up.is_set():
                _print_to_stderr(f"error: the first node, which hosts the store of all ranks, is not reachable ({first_line(lost)})")

    def _watch(self) -> None:
        """Answer requests for reports; send a request if the training thread makes no progress."""
        before, since = None, time.monotonic()
        while not self._is_leaving.wait(min(POLL_S, self._timeout_s / POLLS_PER_TIMEOUT)):
            now = [(frame.f_code, frame.f_lasti) for frame, _ in self._frames()]
            if now != before:
                before, since = now, time.monotonic()
            still_s = time.monotonic() - since
            try:
                asks = still_s > NEAR_TIMEOUT * self._timeout_s and self._request_reports()
                if self._answer_request():
                    since = time.monotonic()
                if asks:
                    answers, gone = self._read_reports()
                    line = diagnose(answers, gone, stacks=self._folder)
                    _print_to_stderr(f"warning: rank {self._world.rank} has not moved for {still_s:.0f} s: {line}")
                    self._exit_for_lost_ranks(gone)
            except dist.DistError:  # the first node is gone; the next collective will fail and report it
                return
            except MemoryError:  # the training thread will raise and report it
                continue

    def _frames(self) -> list[tuple[FrameType, int]]:
        return list(traceback.walk_stack(sys._current_frames()[self._watched]))[::-1]

    def _request_reports(self) -> bool:
        """Request new reports from all ranks; return False if another rank requested them first."""
        mine = f"{_request_number(self._last_request) + 1} rank {self._world.rank}"
        return self._store.compare_set("watch/asked", self._last_request.decode(), mine).decode() == mine

    def _answer_request(self) -> bool:
        """Answer a new request with a report and a stack file; return False if there is no request.

        A rank that is exiting does not answer requests, because it publishes its last report.
        """
        asked = self._store.get("watch/asked")
        if asked == self._last_request or self._is_leaving.is_set():
            return False
        if asked.decode() == _END_ALL:
            self._exit_process()
        self._last_request = asked
        frames = self._frames()
        answer = RankReport(node=self._node, location=innermost_place(frames), is_waiting=is_waiting(frames))
        self._write_stacks_in_thread(answer)
        self._publish_report(asked.decode(), answer)
        self._store.set(f"watch/heard/{self._world.rank}", str(_request_number(asked)))
        return True

    def _exit_for_lost_ranks(self, gone: Mapping[int, RankReport]) -> None:
        """End the run if a rank in `gone` has missed MAX_MISSED_REPLIES requests in a row."""
        number = _request_number(self._last_request)
        silent = {rank: said for rank, said in gone.items() if number - int(self._store.get(f"watch/heard/{rank}")) >= MAX_MISSED_REPLIES}
        if silent:
            missed = f"to {MAX_MISSED_REPLIES} requests in a row; was the process stopped, or does its node hang?"
            self._store.compare_set("watch/verdict", "", f"no response from {_name_ranks(silent)} {missed}")
            self._store.set("watch/asked", _END_ALL)
            self._exit_process()

    def _exit_process(self) -> NoReturn:
        """Print the diagnosis and exit this process immediately.

        An exception would not help, because it cannot interrupt a thread blocked in a collective.
        """
        self._print_once(self._store.get("watch/verdict").decode())
        time.sleep(2 * POLL_S)  # the other ranks read the diagnosis first and do not blame this exit
        os._exit(1)

    def _write_stacks_in_thread(self, answer: RankReport) -> None:
        """Write the stacks in a separate thread, so that a hanging disk does not delay the report.

        If the previous write is still running, no new write is started.
        """
        if self._writer is not None and self._writer.is_alive():
            return
        self._writer = threading.Thread(target=self._write_stacks, args=(answer,), name="stacks", daemon=True)
        with suppress(RuntimeError):  # low memory: no thread, but the report is still published
            self._writer.start()
            self._writer.join(STACK_WRITE_TIMEOUT_S)

    def _write_stacks(self, answer: RankReport) -> None:
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write_to(self._folder / f"rank_{self._world.rank}.txt", answer)

    def _write_to(self, path: Path, answer: RankReport) -> None:
        with path.open("w") as file:
            file.write(f"rank {self._world.rank} ({self._node}), {time.strftime('%Y-%m-%d %H:%M:%S')}, at {answer.location}\n\n")
            file.flush()
            faulthandler.dump_traceback(file)

    def _report_failure(self, error: BaseException) -> None:
        """Print the diagnosis of a failed collective: one line per node, identical on all nodes."""
        self._request_reports()
        line = self._exceeded_timeout(error) + diagnose(*self._read_reports(), stacks=self._folder)
        self._print_once(self._store.compare_set("watch/verdict", "", line).decode())

    def _print_once(self, line: str) -> None:
        """Print an error line on only one rank per node."""
        if self._store.add(f"watch/told/{self._world.node}", 1) == 1:
            _print_to_stderr(f"error: {line}")

    def _exceeded_timeout(self, error: BaseException) -> str:
        """Return a text that names the exceeded timeout, or '' if the error is not a timeout.

        The text names parallel.straggler_timeout_s for world.long_timeout_group, and
        parallel.timeout_s for all other groups.
        """
        found = re.search(r"Timed out waiting (\d+)ms", str(error))
        if found is None:
            return ""
        limit_s, own_s = int(found[1]) / 1000, self._timeout_s
        is_own = limit_s in (own_s, ceil(own_s), round_up_to_minutes(own_s) * 60)  # timeouts of the groups of torch, vLLM and Megatron
        return f"parallel.{'timeout_s' if is_own else 'straggler_timeout_s'}={limit_s:g}: a collective waited longer; "

    def _publish_report(self, when: str, answer: RankReport) -> None:
        self._store.set(f"watch/{when}/{self._world.rank}", json.dumps(asdict(answer)))

    def _read_reports(self) -> tuple[dict[int, RankReport], dict[int, RankReport]]:
        """Return all replies, and the initial reports of ranks without a reply, keyed by rank.

        If another rank sends a new request while this rank waits, this rank answers that request
        and reads the replies to it.
        """
        answers: dict[int, RankReport] = {}
        deadline = time.monotonic() + REPLY_TIMEOUT_S
        while len(answers) < self._world.size and time.monotonic() < deadline:
            time.sleep(POLL_S / 10)
            self._answer_request()
            asked = self._store.get("watch/asked").decode()
            for rank, when in product(range(self._world.size), ("last", asked)):
                if rank not in answers and self._store.check([f"watch/{when}/{rank}"]):
                    answers[rank] = self._read_report(when, rank)
        gone = {rank: self._read_report("here", rank) for rank in range(self._world.size) if rank not in answers}
        return answers, gone

    def _read_report(self, when: str, rank: int) -> RankReport:
        return RankReport(**json.loads(self._store.get(f"watch/{when}/{rank}")))


def exit_reason(error: BaseException | None) -> str:
    """Return the reason for a rank's exit, which other ranks print as an error."""
    if error is None:
        return "finished before the other ranks"
    if isinstance(error, MemoryError):
        return f"MemoryError: {first_line(error) or 'out of memory'}; give the node more memory, or lower batch.micro_batch_tokens"
    return first_line(error) or type(error).__name__


def _request_number(asked: bytes) -> int:
    """Return the number of a request. Example: b"3 rank 1" -> 3."""
    return int(asked.split()[0])


def diagnose(answers: Mapping[int, RankReport], gone: Mapping[int, RankReport], *, stacks: Path) -> str:
    """Return a line that names the ranks for which the other ranks are waiting.

    Args:
        answers: Reports, keyed by rank. A report with an exit reason takes precedence, because it
            best explains the failure.
        gone: Initial reports of the ranks that did not reply, keyed by rank.
        stacks: Folder with the stack files.
    """
    ended = {rank: answer for rank, answer in answers.items() if answer.exit_reason}
    waiting = {rank: answer for rank, answer in answers.items() if answer.is_waiting}
    lagging = {rank: answer for rank, answer in answers.items() if not (answer.is_waiting or answer.exit_reason)}
    if ended:
        rank, answer = next(iter(ended.items()))
        return f"{answer.exit_reason} (rank {rank}, {answer.node})"
    if gone:
        return f"no response from {_name_ranks(gone)}; was a node lost, was memory exhausted, or were they killed?"
    if not lagging:
        return f"all ranks wait for each other at {_describe_reports(waiting)}; stacks: {stacks}"
    verb = "is" if len(lagging) == 1 else "are"
    others = f"the others wait at {_describe_reports(waiting)}" if waiting else "no rank waits for them"
    return f"{_name_ranks(lagging)} {verb} behind, at {_describe_reports(lagging)}; {others}; stacks: {stacks}"


def _name_ranks(answers: Mapping[int, RankReport]) -> str:
    """Return ranks and their nodes as text, such as `ranks 2 and 3 (node 1, n2)`."""
    nodes = "; ".join(dict.fromkeys(answer.node for answer in answers.values()))
    ranks = " and ".join(map(str, answers))
    return f"rank{'s' if len(answers) > 1 else ''} {ranks} ({nodes})"


def _describe_reports(answers: Mapping[int, RankReport]) -> str:
    return ", ".join(dict.fromkeys(answer.location for answer in answers.values()))


def innermost_place(frames: Sequence[tuple[FrameType, int]]) -> str:
    """Return the innermost line of this package on the stack, and the stack's innermost line.

    If the two lines differ, the stack's innermost line is in parentheses, for example
    `training_loop.py:188 in attach (threading.py:320 in wait)`.
    """
    told = [f"{Path(frame.f_code.co_filename).name}:{line} in {frame.f_code.co_name}" for frame, line in frames]
    own = [number for number, (frame, _) in enumerate(frames) if _is_package_file(Path(frame.f_code.co_filename))]
    return told[-1] if not own or told[own[-1]] == told[-1] else f"{told[own[-1]]} ({told[-1]})"


def _is_package_file(path: Path) -> bool:
    return path.is_relative_to(_PACKAGE) and path not in _WAIT_HELPERS


def is_waiting(frames: Sequence[tuple[FrameType, int]]) -> bool:
    """Return True if the innermost frame is in a torch collective or calls .wait().

    Megatron waits for collectives with .wait(). Frames in torch.distributed.checkpoint do not
    count, because they wait for a disk.
    """
    frame, line = frames[-1]
    file = frame.f_code.co_filename
    is_collective = "/torch/distributed/" in file and "/torch/distributed/checkpoint/" not in file
    return is_collective or ".wait(" in linecache.getline(file, line)


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
