"""Checks the mishaps of disks in an isolated process. Prints `seen` and the capabilities that this
machine lacks.

    python -m tests.support.chaos_disks
"""

import errno
import multiprocessing
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from megatron_rl.cli.app import add_disk_full_hint
from megatron_rl.config import WandbSettings
from megatron_rl.observe.metrics import MetricsLog, read_metrics
from tests.chaos.mishaps import NotNow, Scene, strike
from tests.chaos.plan import Mishap
from tests.chaos.room import SEGMENTS, Room

STALL_S = 1.5


def write_errno(path: Path) -> int:
    """Write a page to the path. Return the errno of the failure, or 0 if there is none."""
    try:
        path.write_bytes(bytes(4096))
    except OSError as error:
        return error.errno
    return 0


def apply_mishap(kind: str, scene: Scene) -> bool:
    """Inject the mishap and return True.

    If this machine lacks the means, check that it raises NotNow with the reason, and return False.
    """
    mishap = Mishap(what=kind, number=0, after=0, share=0.0, lasts_s=STALL_S)
    lacks = scene.room.lacks if kind.startswith("fill") else scene.room.lacks_blocks
    if lacks:
        with pytest.raises(NotNow, match=re.escape(lacks)):
            strike(mishap, scene)
    else:
        strike(mishap, scene)
    return not lacks


def wait_for_slow_write(path: Path, least_s: float) -> bool:
    """Write pages until a write takes longer than `least_s`. Return whether this happened within
    20 s and the write took less than 20 s.

    On a loaded machine the disk freezes late, and the first write may still be fast.
    """
    deadline = time.monotonic() + 20
    while (began := time.monotonic()) < deadline:
        assert write_errno(path) == 0
        if (took := time.monotonic() - began) > least_s:
            return took < 20
    return False


def check_stalls(scene: Scene) -> None:
    """A writer waits until the disk is thawed, either after its time or by the reversal of the
    mishap.
    """
    for what, least_s in (("stall disk", STALL_S - 0.5), ("slow disk", 0.3)):
        apply_mishap(what, scene)
        assert wait_for_slow_write(scene.folder / "disk" / "file", least_s), what
        scene.take_back(all_of_it=True)
    apply_mishap("hang disk", scene)
    time.sleep(0.3)
    began = time.monotonic()
    scene.take_back(all_of_it=True)
    assert write_errno(scene.folder / "disk" / "file") == 0 and time.monotonic() - began < 20


def check_read_only(scene: Scene) -> None:
    """Nothing can be written to a disk that has become read-only.

    After the file-system check the flushed data, which includes each line of the metrics, is
    present, and unflushed data is not.
    """
    disk = scene.folder / "disk"
    log = MetricsLog(disk / "run", WandbSettings(mode="disabled"), {})
    for step in range(3):
        log.log(step, {"a": 1.0})
    (disk / "unflushed").write_text("x")
    apply_mishap("protect disk", scene)
    assert write_errno(disk / "other") == errno.EROFS
    with pytest.raises(OSError, match="Read-only file system"):
        log.log(3, {"a": 1.0})
    with suppress(OSError):  # closing writes once more
        log.close()
    scene.take_back(all_of_it=True)
    scene.room.mend(disk)
    assert [line["step"] for line in read_metrics(disk / "run" / "metrics.jsonl")] == [0, 1, 2]
    assert not (disk / "unflushed").exists() or not (disk / "unflushed").read_bytes()
    assert write_errno(disk / "other") == 0


def run_disk_mishaps(room: Room, folder: Path) -> None:
    room.disk(folder / "disk")
    life = SimpleNamespace(num_recorded=0, folder=folder / "disk" / "run")
    scene = Scene(life=life, home=folder, folder=folder, room=room, servers=None)
    if not room.lacks_blocks:
        check_stalls(scene)
        check_read_only(scene)
    for what in ("stall disk", "slow disk", "hang disk", "protect disk"):
        assert not room.lacks_blocks or not apply_mishap(what, scene), what
    for what, place in (("fill segments", SEGMENTS), ("fill disk", folder / "disk"), ("fill segments", SEGMENTS)):
        if apply_mishap(what, scene):
            assert write_errno(place / "more") == errno.ENOSPC
            if place == SEGMENTS:
                with pytest.raises(OSError, match="^.Errno 28. [A-Za-z ]*$") as met:
                    multiprocessing.Lock()
                assert add_disk_full_hint(str(met.value)).startswith(f"{SEGMENTS}: [Errno 28] ")
            (place / "more").unlink(missing_ok=True)
            scene.take_back(all_of_it=True)
            assert write_errno(place / "more") == 0
            (place / "more").unlink()
    assert room.segments(without={os.getpid()}) == set()
    room.give_back(folder / "disk")


if __name__ == "__main__":
    own = Room()
    with TemporaryDirectory() as made:
        run_disk_mishaps(own, Path(made))
    print("seen", own.lacks or own.lacks_blocks)
