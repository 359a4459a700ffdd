"""Implements the mishaps (injected faults) and their reversal."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.chaos.pair import members
from tests.chaos.plan import SLOW_ROUNDS, SLOW_S, Mishap
from tests.chaos.room import SEGMENTS, Room, descendants
from tests.chaos.runs import PLAYER, Life, spoil_data
from tests.chaos.servers import Server, Servers
from tests.support import fork_server

Undo = Callable[[], None]
CLOCK_S = (3600.0, -3600.0, 86400.0 * 400, -86400.0 * 400)
"""Seconds by which the clock jumps."""
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "pause": signal.SIGSTOP, "hold": signal.SIGSTOP, "slow": signal.SIGSTOP}
RETRY_S = 0.02
BALLAST = "ballast"


class NotNow(Exception):
    """Raised if the target process does not exist yet, or if this machine cannot inject the
    mishap.
    """


@dataclass(slots=True, kw_only=True)
class Scene:
    """The processes, folders and servers of a run that mishaps act on."""

    life: Life
    home: Path
    folder: Path
    """Folder of the seed; the run directory is disk/run in it."""
    room: Room
    servers: Servers | None
    happened: list[str] = field(default_factory=list)
    others: list[tuple[int | None, str]] = field(default_factory=list)
    """Exit code and output of each second run. The exit code is None if the run was still
    active.
    """
    undo: list[tuple[float, Undo]] = field(default_factory=list)
    """Pending reversals: the due time (time.monotonic) and the function. All of them run at the end
    of the attempt.
    """

    def later(self, seconds: float, undo: Undo) -> None:
        self.undo.append((time.monotonic() + seconds, undo))

    def take_back(self, *, all_of_it: bool = False) -> None:
        now = time.monotonic()
        due = [each for each in self.undo if all_of_it or each[0] <= now]
        self.undo = [each for each in self.undo if each not in due]
        for _, undo in sorted(due, key=lambda each: each[0]):
            undo()


def strike(mishap: Mishap, scene: Scene) -> None:
    """Inject the mishap now. NotNow means that the caller should try again shortly."""
    how, whom = mishap.what.split()
    match whom:
        case "rank":
            _rank(how, mishap, scene)
        case "worker" | "zygote":
            _process(how, mishap, scene, _boxes(whom))
        case "speaker_run" | "listener_run" | "speaker_service" | "listener_service":
            _process(how, mishap, scene, members(whom))
        case "judge" | "server" | "engine":
            _server(how, whom, mishap, scene)
        case _:
            OTHERS[mishap.what](mishap, scene)
    scene.happened.append(f"{mishap}: {scene.life.num_recorded} recorded")


def _rank(how: str, mishap: Mishap, scene: Scene) -> None:
    life = scene.life
    rank = mishap.number % len(life.ranks)
    chosen = life.ranks[rank]
    if chosen.poll() is not None:
        raise NotNow("it has ended")
    chosen.send_signal(SIGNALS[how])
    if how in ("kill", "hold"):
        life.struck.add(rank)
    _go_on(how, chosen.pid, mishap, scene)


def _boxes(whom: str) -> list[int]:
    """Return the process ids of sandbox zygotes or of their workers.

    A worker is a child of a zygote and has the same command line.
    """
    found = []
    for pid, command in descendants().items():
        with contextlib.suppress(psutil.NoSuchProcess):
            is_worker = "megatron_rl_sandbox.zygote" in " ".join(psutil.Process(psutil.Process(pid).ppid()).cmdline())
            if "megatron_rl_sandbox.zygote" in command and is_worker == (whom == "worker"):
                found.append(pid)
    return sorted(found)


def _process(how: str, mishap: Mishap, scene: Scene, pids: list[int]) -> None:
    if not pids:
        raise NotNow(f"there is none: {mishap.what}")
    pid = pids[mishap.number % len(pids)]
    _signal(pid, SIGNALS[how])
    _go_on(how, pid, mishap, scene)


def _go_on(how: str, pid: int, mishap: Mishap, scene: Scene) -> None:
    """Schedule the continuation of a stopped process: once after a "pause", repeatedly for "slow",
    never after a "hold".
    """
    if how == "pause":
        scene.later(mishap.lasts_s, lambda: _signal(pid, signal.SIGCONT))
    for round_ in range(SLOW_ROUNDS if how == "slow" else 0):
        scene.later(SLOW_S * (2 * round_ + 1), lambda: _signal(pid, signal.SIGCONT))
        if round_ + 1 < SLOW_ROUNDS:
            scene.later(SLOW_S * (2 * round_ + 2), lambda: _signal(pid, signal.SIGSTOP))


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _server(how: str, whom: str, mishap: Mishap, scene: Scene) -> None:
    server: Server = scene.servers.named[whom]
    if how == "cut":
        scene.servers.wires[whom].cut()
        scene.later(mishap.lasts_s, scene.servers.wires[whom].mend)
    elif how == "slow":
        scene.servers.wires[whom].delay_s = 0.5
        scene.later(mishap.lasts_s, scene.servers.wires[whom].mend)
    elif how == "kill":
        server.kill()
        scene.later(mishap.lasts_s, server.start)
    else:
        server.send(signal.SIGSTOP)
        scene.later(mishap.lasts_s, lambda: server.send(signal.SIGCONT))


def _fill_disk(mishap: Mishap, scene: Scene) -> None:
    if scene.room.lacks:
        raise NotNow(scene.room.lacks)
    ballast = scene.folder / "disk" / BALLAST
    _fill(ballast)

    def empty() -> None:
        with contextlib.suppress(OSError):  # read-only disk: the next attempt starts with an empty one (seed._live)
            ballast.unlink(missing_ok=True)

    scene.later(3600, empty)


def _fill(ballast: Path) -> None:
    """Write to the file until its file system is full."""
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


HANG_S = 80.0
"""Seconds for which a disk hangs; longer than the timeout of collectives (runs.WAIT_S)."""
FREEZES = {
    "slow": f"for round in $(seq {SLOW_ROUNDS}); do fsfreeze -f {{disk}}; sleep {SLOW_S}; fsfreeze -u {{disk}}; sleep {SLOW_S / 4}; done",
    "stall": "fsfreeze -f {disk}; sleep {lasts_s}; fsfreeze -u {disk}",
    "hang": f"fsfreeze -f {{disk}}; sleep {HANG_S}; fsfreeze -u {{disk}}",
}
"""Shell commands that freeze and thaw a disk. Writers to a frozen disk block. A separate process
thaws the disk, so that it is thawed even if this process is killed.
"""


def _freeze(mishap: Mishap, scene: Scene) -> None:
    if scene.room.lacks_blocks:
        raise NotNow(scene.room.lacks_blocks)
    disk = scene.folder / "disk"
    script = FREEZES[mishap.what.split()[0]].format(disk=shlex.quote(str(disk)), lasts_s=mishap.lasts_s)
    freezer = subprocess.Popen(["sh", "-c", script], stderr=subprocess.DEVNULL, start_new_session=True)

    def thaw() -> None:
        if freezer.poll() is None:
            os.killpg(freezer.pid, signal.SIGKILL)
        freezer.wait()
        subprocess.run(["fsfreeze", "-u", disk], stderr=subprocess.DEVNULL, check=False)  # fails if nothing is frozen

    scene.later(3600, thaw)


def _protect_disk(mishap: Mishap, scene: Scene) -> None:
    """Make the disk read-only until the next attempt, which starts after a file-system check
    (Room.mend).
    """
    if scene.room.lacks_blocks:
        raise NotNow(scene.room.lacks_blocks)
    scene.room.protect(scene.folder / "disk")


def _fill_segments(mishap: Mishap, scene: Scene) -> None:
    if scene.room.lacks:
        raise NotNow(scene.room.lacks)
    there = os.statvfs(SEGMENTS)
    try:
        scene.room.bound_segments(str((there.f_blocks - there.f_bfree) * there.f_frsize + (1 << 16)))
    except OSError as error:
        raise NotNow("somebody has taken more meanwhile") from error
    ballast = SEGMENTS / BALLAST
    _fill(ballast)

    def empty() -> None:
        ballast.unlink(missing_ok=True)
        scene.room.bound_segments("50%")

    scene.later(3600, empty)


def _start_second(mishap: Mishap, scene: Scene) -> None:
    """Start another run with the same engine in another folder; it ends with this attempt."""
    life = scene.life
    folder, temporary = scene.folder / "second", scene.folder / "tmp_second"
    temporary.mkdir(exist_ok=True)
    words = (*life.words, f"run.dir={folder / 'disk' / 'run'}")
    second = fork_server.Process(PLAYER, *words, environment={"TMPDIR": str(temporary)})

    def end() -> None:
        code = second.poll()
        second.kill()
        said = second.output.read_text(errors="replace")
        scene.others.append((code, said))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(temporary, ignore_errors=True)

    scene.later(3600, end)


def _remove_folder(mishap: Mishap, scene: Scene) -> None:
    if not scene.life.folder.exists():
        raise NotNow("there is no run folder yet")
    shutil.rmtree(scene.life.folder, ignore_errors=True)


def _file(name: str, content: str = "") -> Callable[[Mishap, Scene], None]:
    def lay(mishap: Mishap, scene: Scene) -> None:
        path = scene.folder / name
        path.write_text(content or str(CLOCK_S[mishap.number % len(CLOCK_S)]))
        scene.later(3600, lambda: path.unlink(missing_ok=True))

    return lay


def _lie(words: str) -> Callable[[Mishap, Scene], None]:
    def lead_astray(mishap: Mishap, scene: Scene) -> None:
        scene.servers.wires["judge"].lead_to(scene.servers.liars[words])
        scene.later(3600, scene.servers.tell_truth)

    return lead_astray


def _change_data(mishap: Mishap, scene: Scene) -> None:
    file, before = spoil_data(scene.home, mishap.number)
    scene.later(3600, lambda: file.write_bytes(before))


OTHERS: Mapping[str, Callable[[Mishap, Scene], None]] = {
    "start second": _start_second,
    "fill disk": _fill_disk, "remove folder": _remove_folder, "change data": _change_data, "jump clock": _file("clock"),
    "slow disk": _freeze, "stall disk": _freeze, "hang disk": _freeze, "protect disk": _protect_disk, "fill segments": _fill_segments,
    "nan reward": _file("nan_reward", "1"), "nan loss": _file("nan_loss", "1"), "lie type": _lie("type"), "lie one": _lie("one"),
}  # fmt: skip
