"""Isolates a process so that everything its runs leave behind can be counted: it adopts all
orphaned descendants and has its own /dev/shm.

As root, this process gets its own mounts and System V segments (unshare(2)). Its /dev/shm can be
filled. Each run directory lies on a small ext4 file system in a file (a loop device), which can be
filled, frozen (FIFREEZE), and made read-only by the kernel, as after a device error. If mounts are
not allowed, everything is shared with other processes; segments are then not counted and nothing is
filled (`lacks` gives the reason). Without loop devices the disk is a tmpfs, which can only be
filled (`lacks_blocks`).
"""

import ctypes
import os
import subprocess
import tempfile
import time
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil

CLONE_NEWNS, CLONE_NEWIPC = 0x00020000, 0x08000000
MS_REMOUNT, MS_REC, MS_PRIVATE = 0x20, 0x4000, 1 << 18
PR_SET_CHILD_SUBREAPER = 36
SEGMENTS = Path("/dev/shm")
DISK_BYTES = 96 << 20
"""Size of the disk of a run directory. Three checkpoints and the model fit in a tenth of it."""
MEND_S = 20.0
"""Maximum seconds to wait for processes with open files on a disk to exit before the disk is
checked.
"""
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


class Room:
    def __init__(self) -> None:
        """Isolate this process. Must be called before the process starts any other process."""
        _call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.lacks = ""
        self._protected: set[Path] = set()
        try:
            _call("unshare", CLONE_NEWNS | CLONE_NEWIPC)
            _call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
            _call("mount", b"tmpfs", bytes(SEGMENTS), b"tmpfs", 0, b"mode=1777")
        except OSError as error:
            self.lacks = f"no mounts of its own ({error}): segments are not counted, no disk is filled"
        self.lacks_blocks = self.lacks or _lacks_blocks()
        forkserver.ensure_running()
        resource_tracker.ensure_running()

    def disk(self, folder: Path) -> None:
        """Create a folder, on its own small disk if this machine allows it."""
        folder.mkdir(parents=True)
        if not self.lacks_blocks:
            make_ext4(folder)
        elif not self.lacks:
            _call("mount", b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={DISK_BYTES}".encode())

    def give_back(self, folder: Path) -> None:
        self._protected.discard(folder)
        if not self.lacks:
            _call("umount2", bytes(folder), 0)
        image_of(folder).unlink(missing_ok=True)

    def protect(self, folder: Path) -> None:
        """Trigger a file-system error in the kernel.

        From now on nothing is written to this disk, and unwritten data is lost.
        """
        device = os.stat(folder).st_dev
        block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
        Path(f"/sys/fs/ext4/{block}/trigger_fs_error").write_text("chaos")
        self._protected.add(folder)

    def mend(self, folder: Path) -> None:
        """If the disk is read-only, check it and mount it again, as a restart of the
        machine would.
        """
        if folder not in self._protected:
            return
        deadline = time.monotonic() + MEND_S
        while True:
            try:
                _call("umount2", bytes(folder), 0)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        checked = subprocess.run(["e2fsck", "-f", "-p", image_of(folder)], capture_output=True, text=True, check=False)
        if checked.returncode not in (0, 1):
            raise OSError(f"{image_of(folder)}: {checked.stdout}")
        _mount_ext4(folder)
        self._protected.remove(folder)

    def bound_segments(self, size: str) -> None:
        """Set the size of /dev/shm in bytes or as a share of the memory (50%).

        Raises:
            OSError: More than this size is already in use.
        """
        _call("mount", b"tmpfs", bytes(SEGMENTS), b"tmpfs", MS_REMOUNT, f"size={size}".encode())

    def segments(self, *, without: set[int] = frozenset()) -> set[str]:
        """Return the names of POSIX segments and semaphores and the numbers of System V segments,
        except those that the processes `without` or their descendants have mapped.
        """
        if self.lacks:
            return set()
        system_v = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
        found = {path.name for path in SEGMENTS.iterdir()} | {f"shmid {line.split()[1]}" for line in system_v}
        return found - {name for pid in without for name in _mapped(pid)}


def _lacks_blocks() -> str:
    """Return the reason why no loop device is available, or an empty string if one is."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            make_ext4(Path(folder) / "disk")
            _call("umount2", bytes(Path(folder) / "disk"), 0)
        except (OSError, subprocess.CalledProcessError) as error:
            return f"no disk of its own ({error}): none is slow, hangs, or becomes read-only"
    return ""


def image_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.ext4")


def make_ext4(folder: Path) -> None:
    """Create an ext4 file system in a file and mount it at `folder`.

    Raises:
        CalledProcessError, OSError: mkfs or loop devices are missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with image_of(folder).open("wb") as image:
        image.truncate(DISK_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", image_of(folder)], check=True, capture_output=True)
    _mount_ext4(folder)
    (folder / "lost+found").rmdir()


def _mount_ext4(folder: Path) -> None:
    options = "loop,errors=remount-ro"
    subprocess.run(["mount", "-t", "ext4", "-o", options, image_of(folder), folder], check=True, capture_output=True)


def _mapped(pid: int) -> set[str]:
    """Return the names in /dev/shm that a process or a descendant of it has mapped."""
    names = set()
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                names |= {Path(each.path).name for each in process.memory_maps() if each.path.startswith(f"{SEGMENTS}/")}
    return names


def descendants(*, without: set[int] = frozenset()) -> dict[int, str]:
    """Return {pid: command line} of all live descendants of this process, except `without` and
    their descendants. No descendant is missed, because orphans are adopted.
    """
    found: dict[int, str] = {}
    ours = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}  # they serve all seeds
    todo = psutil.Process().children()
    while todo:
        process = todo.pop()
        with suppress(psutil.NoSuchProcess):
            if process.pid in without or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.pid not in ours:
                found[process.pid] = " ".join(process.cmdline()) or process.name()
            todo += process.children()
    return found
