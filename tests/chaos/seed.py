"""Runs one seed: the run with its mishaps, further attempts until the run is finished, and the
checks of the outcome.
"""

import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.mishaps import BALLAST, RETRY_S, NotNow, Scene, strike
from tests.chaos.plan import Mishap, Plan
from tests.chaos.room import Room, descendants
from tests.chaos.runs import Undisturbed, begin_life, run_folder, undisturbed, words_of
from tests.chaos.servers import Servers, with_boxes
from tests.chaos.verdict import differences, given_up, left_behind, trouble_of_end, trouble_of_second

MAX_LIVES = 5
GONE_S = 30.0
"""Maximum seconds for processes to exit after the end of an attempt."""
LYING = "lie one"
"""The mishap of a judge that gives valid but wrong verdicts. The run cannot detect it, so such a
run has to finish but may differ from the undisturbed run.
"""


@dataclass(slots=True, kw_only=True)
class Record:
    """One line of the output file."""

    seed: int
    run: str
    mishaps: list[str]
    happened: list[str] = field(default_factory=list)
    lives: list[str] = field(default_factory=list)
    """Outcome of each attempt: exit codes and the first error line."""
    given_up: list[int] = field(default_factory=list)
    """Steps in which rollouts were given up."""
    is_equal: bool = False
    troubles: list[str] = field(default_factory=list)
    """Everything that is wrong with the outcome; empty if the seed has passed."""
    seconds: float = 0.0


def _seed_folder(plan: Plan, home: Path) -> Path:
    return home / "seeds" / str(plan.seed)


def play(plan: Plan, *, home: Path, room: Room, standing: Mapping[str, Servers], limit_s: float) -> Record:
    """Run the seed and return its record.

    `standing` contains the servers that stay up for all seeds, per run.
    """
    began = time.monotonic()
    record = Record(seed=plan.seed, run=plan.run, mishaps=[str(mishap) for mishap in plan.mishaps])
    folder = _seed_folder(plan, home)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tmp").mkdir(parents=True)
    before = room.segments()
    with ExitStack() as stack:
        room.disk(folder / "disk")
        stack.callback(room.give_back, folder / "disk")
        servers = standing.get(plan.run)
        if plan.run == "vqa":
            servers = stack.enter_context(with_boxes(servers.named["judge"], folder))
        urls = servers.urls() if servers else {}
        words = words_of(plan.run, home, **urls)
        expected = undisturbed(plan.run, home, words, limit_s=limit_s)
        run = run_folder(plan.run, folder)
        for number in range(MAX_LIVES):
            given = {"words": words, "expected": expected, "home": home, "room": room}
            if _live(number, plan, record, servers=servers, limit_s=limit_s, **given):
                break
        stays = {server.process.pid for each in standing.values() for server in each.named.values()}
        served = stays | ({server.process.pid for server in servers.named.values()} if servers else set())
        record.troubles += [f"pid {pid} is left: {command[:120]}" for pid, command in _left(served).items()]
        room.mend(folder / "disk")
        _judge(record, run, expected.folder, has_tools=plan.run != "number_line")
        for each in {run, *(path.parent for path in (folder / "disk").rglob(".lock"))}:
            record.troubles += left_behind(each, folder / "tmp")
    if servers:
        record.troubles += [f"pid {pid} is left of the server: {command[:120]}" for pid, command in _left(stays).items()]
    record.troubles += [f"{name} is left in shared memory" for name in sorted(room.segments(without=stays) - before)]
    record.seconds = round(time.monotonic() - began, 1)
    return record


def _live(
    number: int, plan: Plan, record: Record, *, words: tuple[str, ...], expected: Undisturbed, home: Path, room: Room,
    servers: Servers | None, limit_s: float,
) -> bool:  # fmt: skip
    """Run one attempt. Returns True if the run is finished."""
    coming, folder = [mishap for mishap in plan.mishaps if mishap.life == number], _seed_folder(plan, home)
    room.mend(folder / "disk")
    (folder / "disk" / BALLAST).unlink(missing_ok=True)
    if servers:
        for server in servers.named.values():
            server.wait()
    with begin_life(plan.run, words, folder) as life:
        scene = Scene(life=life, home=home, folder=folder, room=room, servers=servers)
        try:
            in_time = _happen(list(coming), scene, expected, limit_s=limit_s)
        finally:
            scene.take_back(all_of_it=True)
        codes, said = life.codes, life.said
    struck = life.struck | {rank for rank, code in enumerate(codes) if code == -signal.SIGTERM}  # signaled before its handler was installed
    for code, words_of_second in scene.others:
        record.lives.append(f"second run: {code} {_error(words_of_second)}".strip())
        record.troubles += [f"second run: {trouble}" for trouble in trouble_of_second(code, words_of_second)]
    (folder / f"said_{number}.txt").write_text("\n--- rank 1\n".join(said))
    record.happened += scene.happened
    record.lives.append(f"{codes} {_error(*said)}".strip())
    if not in_time:
        record.troubles.append(f"life {number} did not end within {limit_s:.0f} s")
    else:
        record.troubles += [f"life {number}: {trouble}" for trouble in trouble_of_end(codes, said, struck=struck)]
    if not coming and not life.has_finished:
        record.troubles.append(f"life {number} ended with {codes} although nothing happened to it")
    return life.has_finished


def _error(*said: str) -> str:
    """Return the first error line of the outputs."""
    return next((line[:240] for text in said for line in text.splitlines() if line.startswith("error: ")), "")


def _happen(coming: list[Mishap], scene: Scene, expected: Undisturbed, *, limit_s: float) -> bool:
    """Inject the mishaps when they are due, until the attempt is over.

    Returns False if the attempt exceeds `limit_s`.
    """
    life = scene.life
    while not life.is_over():
        passed = life.look()
        if passed > limit_s:
            return False
        reached = [0.0, *life.recorded_s]
        for mishap in list(coming):
            is_near, is_late = len(reached) > mishap.after, len(reached) > mishap.after + 1  # late: faster than the undisturbed run
            if is_late or (is_near and passed - reached[mishap.after] >= expected.seconds(mishap.share, after=mishap.after)):
                with suppress(NotNow):
                    strike(mishap, scene)
                    coming.remove(mishap)
        scene.take_back()
        time.sleep(RETRY_S)
    return True


def _left(without: set[int]) -> dict[int, str]:
    """Return the descendants that are still running after GONE_S seconds."""
    deadline = time.monotonic() + GONE_S
    while (left := descendants(without=without)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _judge(record: Record, run: Path, expected: Path, *, has_tools: bool) -> None:
    if not (run / "eval.json").exists():
        record.troubles.append(f"it was not finished in {len(record.lives)} lives")
        return
    record.given_up = given_up(run)
    found = differences(run, expected, has_tools=has_tools)
    record.is_equal = not found
    has_lied = any(LYING in what for what in record.happened)
    if not record.given_up and not has_lied:
        record.troubles += found
