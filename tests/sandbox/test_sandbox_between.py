"""Tests that locks, file watches and figures of the host do not cross between boxes and the host,
and that common libraries work without them."""

import fcntl
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl_sandbox import mounts
from tests.support.sandbox_pool import PoolRunner, start_pool

SHARED = os.path.realpath(os.__file__)
"""A file that the host and every box can read."""


@pytest.fixture(scope="module")
def room() -> Iterator[PoolRunner]:
    yield from start_pool(size=2)


def answers(room: PoolRunner, *lines: str) -> list[str]:
    """Run each expression in one box. Return its printed value, or the name of its errno."""
    code = "import ctypes, errno, fcntl, os, socket, struct\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    for line in lines:
        code += f"try: print({line})\nexcept OSError as error: print(errno.errorcode[error.errno])\n"
    (result,) = room.run_codes(code)
    assert result.error is None, result.error
    return result.text.splitlines()


def test_nobody_locks_what_all_read(room: PoolRunner):
    """Reproduces finding 15 of the attack of 2026-11-21 (flock) and adds record locks and leases.
    No box can lock a file that all boxes read."""
    fd = f"os.open({SHARED!r}, os.O_RDONLY)"
    lock = "struct.pack('hhxxxxqqixxxx', fcntl.F_RDLCK, 0, 0, 0, 0)"
    taken = answers(
        room,
        f"fcntl.flock({fd}, fcntl.LOCK_EX)",
        *(f"fcntl.fcntl({fd}, {command}, {lock})" for command in (fcntl.F_SETLK, fcntl.F_GETLK, 36, 37)),
        f"fcntl.fcntl({fd}, fcntl.F_SETLEASE, fcntl.F_RDLCK)",
        f"fcntl.fcntl({fd}, 1033, 1)",
    )
    assert taken == ["ENOSYS"] + ["EPERM"] * 6
    with open(SHARED, "rb") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert answers(room, f"fcntl.flock({fd}, fcntl.LOCK_EX | fcntl.LOCK_NB)") == ["ENOSYS"]  # not EAGAIN, which would reveal the lock


def test_nobody_watches_what_all_read(room: PoolRunner):
    """No box can watch files that all boxes read, by dnotify, inotify, fanotify or mincore, nor
    change its cores or read sysinfo."""
    folder = f"os.open({os.path.dirname(SHARED)!r}, os.O_RDONLY)"
    calls = {"inotify_init": 253, "inotify_init1": 294, "fanotify_init": 300, "mincore": 27, "sched_setaffinity": 203, "sysinfo": 99}
    refused = answers(room, f"fcntl.fcntl({folder}, 1026, 1)", *(f"libc.syscall({n}, 0, 0, 0), ctypes.get_errno()" for n in calls.values()))
    assert refused == ["EPERM"] + ["-1 1"] * len(calls)


def test_what_is_told_of_the_host(room: PoolRunner):
    """A box cannot read the name of the host or the credentials of a socket's peer."""
    name, peer, pidfd, kind, filtered = answers(
        room,
        "[os.uname().nodename, socket.gethostname()]",
        "socket.socketpair()[0].getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)",
        "socket.socketpair()[0].getsockopt(socket.SOL_SOCKET, 77, 4)",
        "socket.socketpair()[0].getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM",
        "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)",
    )
    assert name == "['box', 'box']" and socket.gethostname() != "box"
    assert (peer, pidfd, kind, filtered) == ("EPERM", "EPERM", "True", "EPERM")


def test_libraries_live_without_them(room: PoolRunner):
    """multiprocessing, subprocess, asyncio and SQLite (with nolock=1) work without locks and
    watches."""
    (result,) = room.run_codes(
        "import asyncio, multiprocessing, sqlite3, subprocess\n"
        "with multiprocessing.Pool(2) as workers: print(workers.map(abs, [-1, 2]))\n"
        "queue = multiprocessing.Queue(); queue.put(3); print(queue.get())\n"
        "print(subprocess.run('echo 4 | cat', shell=True, capture_output=True, text=True).stdout.strip())\n"
        "async def talk():\n"
        "    cat = await asyncio.create_subprocess_exec('cat', stdin=-1, stdout=-1)\n"
        "    print((await cat.communicate(b'5'))[0].decode())\n"
        "asyncio.run(talk())\n"
        "table = sqlite3.connect('file:x.db?nolock=1', uri=True)\n"
        "table.execute('create table t(a)'); table.execute('insert into t values (6)'); table.commit()\n"
        "print(sqlite3.connect('file:x.db?nolock=1', uri=True).execute('select a from t').fetchone()[0])\n"
    )
    assert (result.text, result.error) == ("[1, 2]\n3\n4\n5\n6\n", None), result.stderr


@pytest.mark.parametrize(("path", "shown"), [("/usr/src/app", "/usr"), ("/usr", "/usr"), ("/usrlocal", None), ("/home/me/run", None)])
def test_which_paths_boxes_read(monkeypatch: pytest.MonkeyPatch, path: str, shown: str | None):
    """`find_exposing_path` returns the system path that makes a path readable in boxes, or None."""
    monkeypatch.setattr(mounts, "system_paths", lambda readable=(): ["/opt/python", "/usr"])
    assert mounts.find_exposing_path(path) == shown


def test_a_link_hides_nothing_from_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`find_exposing_path` resolves links."""
    (tmp_path / "system").mkdir()
    (tmp_path / "project").symlink_to(tmp_path / "system")
    monkeypatch.setattr(mounts, "system_paths", lambda readable=(): [str(tmp_path / "system")])
    assert mounts.find_exposing_path(str(tmp_path / "project" / "run")) == str(tmp_path / "system")


def test_every_box_reads_what_that_says(room: PoolRunner):
    """`find_exposing_path` agrees with a real box: of these folders, the box sees those below a
    system path and no others."""
    folders = [os.path.dirname(SHARED), "/usr/lib", "/var", "/home", "/proc", "/sys", str(Path(__file__).parent)]
    (seen,) = answers(room, f"[path for path in {folders!r} if os.path.isdir(path)]")
    assert re.findall(r"'([^']+)'", seen) == [path for path in folders if mounts.find_exposing_path(path)]
