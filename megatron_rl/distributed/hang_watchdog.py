"""A watch over ranks that wait for each other: who lags, who is gone, and what each was at.

A thread of every rank looks at the stack of the one that trains. Where that stands still for NEARLY of parallel.timeout_s, all ranks are
asked: each writes its stacks to RUN/hang/rank_N.txt, and says where it is and whether it waits for others; a warning names those that do
not. Where a collective fails, because it waited too long or because a peer has died, the run ends with one line a node. So it does where
a rank leaves SILENT questions in a row without an answer, in whatever collective the others wait: one that is slow answers. Ranks talk
through the store that torchrun's processes meet by. On CUDA torch's flight recorder writes the last collectives of NCCL beside the stacks,
when NCCL ends a process that waited too long: this was never run.

Over 300 lines: both sides of one conversation between ranks.
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

from megatron_rl.distributed.world import World, first_line, is_collective_error, round_up_to_minutes
from megatron_rl.errors import PeerLost

FOLDER = "hang"
NEAR_TIMEOUT = 0.9
"""Of the time limit: when NCCL ends a process, that has nothing more to say."""
POLLS_PER_TIMEOUT, POLL_S = 20, 0.5
"""Between two looks: a part of the time limit, and no more than half a second."""
REPLY_TIMEOUT_S = 5.0
"""What the others have for their answers; who gives none is gone."""
STACK_WRITE_TIMEOUT_S = 1.0
"""Seconds that a report waits for its stacks to be written."""
EXIT_TIMEOUT_S = 6 * REPLY_TIMEOUT_S
"""What the last word may take. A store whose process hangs, and has not ended, keeps a request for ever, whatever its time limit: torch
2.13's TCPStore waits for the answer to its own cancellation."""
MAX_MISSED_REPLIES = 3
"""Questions in a row without an answer, after which a rank is given up, however long the others might wait for it
(parallel.straggler_timeout_s)."""
_NO_REQUEST, _END_ALL = "0 nobody", "over"
"""Values in place of a question, which is a number and who asks: before the first one, and when every rank is to end."""
_PACKAGE = Path(__file__).parents[1]
_WAIT_HELPERS = (Path(__file__), _PACKAGE / "distributed/world.py")


@dataclass(slots=True, frozen=True, kw_only=True)
class RankReport:
    """What a rank says when it is asked, or of itself when it ends."""

    node: str
    location: str = ""
    """The line that it is at."""
    is_waiting: bool = False
    """For others, in a collective."""
    exit_reason: str = ""
    """Why it has ended, where that was no collective's failure."""


class HangWatchdog:
    """As a context around what the ranks do together, on every rank; made before they meet. In a world of one it does nothing."""

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
            self._store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=patience)
            self._last_request = self._store.compare_set("watch/asked", "", _NO_REQUEST)
            self._publish_report("here", RankReport(node=self._node))
            self._store.set(f"watch/heard/{self._world.rank}", str(_request_number(self._last_request)))
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """PeerLost instead of a collective's failure."""
        if self._world.size == 1:
            return
        parts = error is not None and is_collective_error(error)
        self._leave_fn = partial(self._exit_with_reason, error, trace, parts)
        self._is_leaving.set()
        self._thread.join(EXIT_TIMEOUT_S)
        if self._thread.is_alive() and parts:
            self._given_up.set()
            _print_to_stderr(f"error: {self._exceeded_timeout(error)}the first node, where all ranks meet, does not answer")
        if parts:
            raise PeerLost from error

    def _watch_and_exit(self) -> None:
        """In the thread, which has the last word, too: where memory is short no other one could be started."""
        self._watch()
        self._is_leaving.wait()
        self._leave_fn()

    def _exit_with_reason(self, error: BaseException | None, trace: TracebackType | None, parts: bool) -> None:
        """The last word of this rank, and why it parts, if it does."""
        try:
            if parts:
                self._publish_report(
                    "last", RankReport(node=self._node, location=innermost_place(list(traceback.walk_tb(trace))), is_waiting=True)
                )
                self._report_failure(error)
            else:
                self._publish_report("last", RankReport(node=self._node, exit_reason=exit_reason(error)))
        except dist.DistError as lost:
            if parts and not self._given_up.is_set():
                _print_to_stderr(f"error: the first node, where all ranks meet, is gone ({first_line(lost)})")

    def _watch(self) -> None:
        """Answer who asks, and ask where nothing moves."""
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
            except dist.DistError:  # the first node is gone: the next collective will say so
                return
            except MemoryError:  # who trains will meet it, too, and say so
                continue

    def _frames(self) -> list[tuple[FrameType, int]]:
        """Of the one that trains, the outermost first."""
        return list(traceback.walk_stack(sys._current_frames()[self._watched]))[::-1]

    def _request_reports(self) -> bool:
        """Ask all ranks anew; False where another one did so at the same time."""
        mine = f"{_request_number(self._last_request) + 1} rank {self._world.rank}"
        return self._store.compare_set("watch/asked", self._last_request.decode(), mine).decode() == mine

    def _answer_request(self) -> bool:
        """Answer, with the stacks in a file, where somebody has asked anew. Who is leaving has its last word instead."""
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
        """End the job where one of these has left too many questions in a row without an answer."""
        number = _request_number(self._last_request)
        silent = {rank: said for rank, said in gone.items() if number - int(self._store.get(f"watch/heard/{rank}")) >= MAX_MISSED_REPLIES}
        if silent:
            missed = f"to {MAX_MISSED_REPLIES} questions in a row; was it stopped, or does its node hang?"
            self._store.compare_set("watch/verdict", "", f"no answer from {_name_ranks(silent)} {missed}")
            self._store.set("watch/asked", _END_ALL)
            self._exit_process()

    def _exit_process(self) -> NoReturn:
        """End this process, whatever it waits for: no exception reaches a thread that is inside a collective."""
        self._print_once(self._store.get("watch/verdict").decode())
        time.sleep(2 * POLL_S)  # the others read the same, and do not take the end of this process for the reason
        os._exit(1)

    def _write_stacks_in_thread(self, answer: RankReport) -> None:
        """Write the stacks. A disk that hangs keeps the thread that writes, and not the answer, and is not asked again."""
        if self._writer is not None and self._writer.is_alive():
            return
        self._writer = threading.Thread(target=self._write_stacks, args=(answer,), name="stacks", daemon=True)
        with suppress(RuntimeError):  # where memory is short there is no thread, and what is said counts, too
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
        """Say why, once a node, and everywhere the same."""
        self._request_reports()
        line = self._exceeded_timeout(error) + diagnose(*self._read_reports(), stacks=self._folder)
        self._print_once(self._store.compare_set("watch/verdict", "", line).decode())

    def _print_once(self, line: str) -> None:
        """Once a node."""
        if self._store.add(f"watch/told/{self._world.node}", 1) == 1:
            _print_to_stderr(f"error: {line}")

    def _exceeded_timeout(self, error: BaseException) -> str:
        """Return which time limit was exceeded, or ''. That of world.long_timeout_group differs from that of all other groups."""
        found = re.search(r"Timed out waiting (\d+)ms", str(error))
        if found is None:
            return ""
        limit_s, own_s = int(found[1]) / 1000, self._timeout_s
        is_own = limit_s in (own_s, ceil(own_s), round_up_to_minutes(own_s) * 60)  # of torch's, vLLM's and Megatron's groups
        return f"parallel.{'timeout_s' if is_own else 'straggler_timeout_s'}={limit_s:g}: a collective waited longer; "

    def _publish_report(self, when: str, answer: RankReport) -> None:
        self._store.set(f"watch/{when}/{self._world.rank}", json.dumps(asdict(answer)))

    def _read_reports(self) -> tuple[dict[int, RankReport], dict[int, RankReport]]:
        """Return those of all ranks, which are waited for, and of each that gives none what it said at the beginning.

        Another rank may ask anew meanwhile: this one answers while it reads, and the answers to the newest question count.
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
    """Return why a rank has ended: the line that the others end with."""
    if error is None:
        return "it is done, and others are not"
    if isinstance(error, MemoryError):
        return f"MemoryError: {first_line(error) or 'no memory was left'}; give its node more, or lower batch.micro_batch_tokens"
    return first_line(error) or type(error).__name__


def _request_number(asked: bytes) -> int:
    """Return the number of a question. Example: b"3 rank 1" -> 3"""
    return int(asked.split()[0])


def diagnose(answers: Mapping[int, RankReport], gone: Mapping[int, RankReport], *, stacks: Path) -> str:
    """Who keeps the others waiting. A rank that has ended knows why; one that is gone has said nothing; the others are at work."""
    ended = {rank: answer for rank, answer in answers.items() if answer.exit_reason}
    waiting = {rank: answer for rank, answer in answers.items() if answer.is_waiting}
    lagging = {rank: answer for rank, answer in answers.items() if not (answer.is_waiting or answer.exit_reason)}
    if ended:
        rank, answer = next(iter(ended.items()))
        return f"{answer.exit_reason} (rank {rank}, {answer.node})"
    if gone:
        return f"no answer from {_name_ranks(gone)}; was a node lost, memory short, or did someone end them?"
    if not lagging:
        return f"all ranks wait, each for another, at {_describe_reports(waiting)}; stacks: {stacks}"
    verb = "is" if len(lagging) == 1 else "are"
    others = f"the others wait at {_describe_reports(waiting)}" if waiting else "nobody waits for them"
    return f"{_name_ranks(lagging)} {verb} behind, at {_describe_reports(lagging)}; {others}; stacks: {stacks}"


def _name_ranks(answers: Mapping[int, RankReport]) -> str:
    """Example: `ranks 2 and 3 (node 1, n2)`."""
    nodes = "; ".join(dict.fromkeys(answer.node for answer in answers.values()))
    ranks = " and ".join(map(str, answers))
    return f"rank{'s' if len(answers) > 1 else ''} {ranks} ({nodes})"


def _describe_reports(answers: Mapping[int, RankReport]) -> str:
    """Where they are: each place once."""
    return ", ".join(dict.fromkeys(answer.location for answer in answers.values()))


def innermost_place(frames: Sequence[tuple[FrameType, int]]) -> str:
    """Return the innermost line of this package, and the innermost line of all behind it in parentheses.

    Example: `training_loop.py:188 in attach (threading.py:320 in wait)`.
    """
    told = [f"{Path(frame.f_code.co_filename).name}:{line} in {frame.f_code.co_name}" for frame, line in frames]
    own = [number for number, (frame, _) in enumerate(frames) if _is_package_file(Path(frame.f_code.co_filename))]
    return told[-1] if not own or told[own[-1]] == told[-1] else f"{told[own[-1]]} ({told[-1]})"


def _is_package_file(path: Path) -> bool:
    return path.is_relative_to(_PACKAGE) and path not in _WAIT_HELPERS


def is_waiting(frames: Sequence[tuple[FrameType, int]]) -> bool:
    """Return whether the innermost frame is a collective of torch, or waits for one (Megatron's, by .wait()).

    Code of torch.distributed.checkpoint waits for a disk and does not count.
    """
    frame, line = frames[-1]
    file = frame.f_code.co_filename
    is_collective = "/torch/distributed/" in file and "/torch/distributed/checkpoint/" not in file
    return is_collective or ".wait(" in linecache.getline(file, line)


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
