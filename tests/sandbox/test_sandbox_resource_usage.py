"""Tests the watchdog's measurement of resources: the difference of two measurements contains
exactly what a child process allocated in between."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from megatron_rl_sandbox import BoxLimits, resource_usage
from megatron_rl_sandbox.resource_usage import MAPPING_BYTES, PIPE_BYTES, SOCKET_BYTES

NOISE = 1 << 20
"""Bytes by which an interpreter grows while it reads a line."""
CHILD = """
import ctypes, mmap, os, socket, sys, threading, time
kept = []
print(flush=True)
exec(sys.stdin.readline().encode().decode("unicode_escape"))
print(flush=True)
time.sleep(60)
"""


@contextmanager
def child(work: str) -> Iterator[tuple[int, Callable[[], None]]]:
    """Yield (pid, do): a process that executes `work` when `do` is called, and then waits."""
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            process.stdout.readline()

            def do() -> None:
                process.stdin.write(work.encode("unicode_escape").decode() + "\n")
                process.stdin.flush()
                process.stdout.readline()

            yield process.pid, do
        finally:
            process.kill()


def grown(work: str, **wanted: bool) -> tuple[int, int]:
    """Return the (bytes, tasks) by which the measured usage of a child grows with its work."""
    with child(work) as (pid, do):
        before = resource_usage.measure_usage(pid, **wanted)
        do()
        after = resource_usage.measure_usage(pid, **wanted)
    return after.memory_bytes - before.memory_bytes, after.num_tasks - before.num_tasks


FORK = "if os.fork() == 0:\n    {work}\n    print(flush=True)\n    time.sleep(60)\ntime.sleep(60)"


@pytest.mark.parametrize(
    ("work", "memory", "tasks"),
    [
        ("kept.append(b'x' * (64 << 20))", 64 << 20, 0),
        ("kept += [socket.socketpair() for _ in range(20)]", 40 * SOCKET_BYTES, 0),
        ("kept += [os.pipe() for _ in range(100)]", 100 * PIPE_BYTES, 0),
        # 8 GiB in steps of 2 MiB: a page table of 4 KiB for each step
        (
            "m = mmap.mmap(-1, 8 << 30, flags=0x4022, prot=1)\nm.madvise(15)\nfor at in range(0, 8 << 30, 2 << 20): m[at]\nkept.append(m)",
            4096 * 4096,
            0,
        ),
        ("for _ in range(3): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", 0, 3),
        ("kept.append(open('/dev/zero'))\nkept.append(os.memfd_create('x'))\nos.write(kept[1], b'x' * (8 << 20))", 0, 0),
    ],
    ids=["memory", "sockets", "pipes", "page tables", "threads", "files"],
)
def test_what_is_charged(work: str, memory: int, tasks: int):
    """The measurement grows by the memory and the tasks that a child allocates, within 1 MiB."""
    found, num = grown(work)
    assert memory <= found <= memory + NOISE, (found, memory)
    assert num == tasks


def test_mappings_are_charged_where_they_are_asked_for():
    """Mappings are charged only if `count_mappings` is set. Every second page is made read-only,
    which yields twice as many mappings as changed pages."""
    work = (
        "libc = ctypes.CDLL(None)\nlibc.mmap.restype = ctypes.c_void_p\nlibc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + 3 * "
        "[ctypes.c_int] + [ctypes.c_long]\nlibc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]\n"
        "at = libc.mmap(None, 20000 * 4096, 3, 0x4022, -1, 0)\nfor page in range(at, at + 20000 * 4096, 8192): libc.mprotect(page, 4096, 1)"
    )
    assert grown(work)[0] <= NOISE
    assert 20000 * MAPPING_BYTES <= grown(work, count_mappings=True)[0] <= 20000 * MAPPING_BYTES + NOISE


def test_mappings_are_read_once_a_process(monkeypatch: pytest.MonkeyPatch):
    """The mappings of a process are read once, because its five threads share them. Reading 20,000
    mappings takes milliseconds."""
    read, mappings = [], resource_usage._mapping_bytes
    monkeypatch.setattr(resource_usage, "_mapping_bytes", lambda thread: read.append(thread) or mappings(thread))
    with child("for _ in range(4): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()") as (pid, do):
        do()
        assert resource_usage.measure_usage(pid, count_mappings=True).num_tasks == 5
    assert len(read) == 1


@pytest.mark.parametrize(
    ("work", "memory"),
    [
        (FORK.format(work="kept.append(b'x' * (48 << 20))"), 48 << 20),
        (FORK.format(work="kept += [socket.socketpair() for _ in range(20)]"), 40 * SOCKET_BYTES),
        ("kept += [socket.socketpair() for _ in range(20)]\n" + FORK.format(work="pass"), 40 * SOCKET_BYTES),  # shared ends count once
    ],
    ids=["memory", "sockets", "shared sockets"],
)
def test_a_tree_is_counted_whole(work: str, memory: int):
    """The usage of a process tree is the sum over its processes, less the memory that a fork shares
    with its parent. Each process has the memory that the zygote had, so `shared` is subtracted from
    both."""
    with child(work) as (pid, do):
        shared = psutil.Process(pid).memory_info()
        shared = shared.rss - shared.shared
        before = resource_usage.measure_usage(pid, shared_bytes=shared)
        do()
        after = resource_usage.measure_usage(pid, shared_bytes=shared)
    assert memory <= after.memory_bytes - before.memory_bytes <= memory + 3 * NOISE
    assert (before.num_tasks, after.num_tasks) == (1, 2)


def test_a_process_whose_first_thread_has_ended_has_its_memory():
    """A process whose first thread has ended is charged for its memory and sockets, although
    /proc/PID/status lists no memory for it and /proc/PID/fd no descriptors."""
    work = (
        "def stay():\n  time.sleep(0.2)\n  kept.append(b'x' * (48 << 20))\n  kept.extend(socket.socketpair() for _ in range(20))\n"
        "  print(flush=True)\n  time.sleep(60)\nthreading.Thread(target=stay).start()\nctypes.CDLL(None).syscall(60, 0)"
    )
    with child(work) as (pid, do):
        do()
        assert psutil.Process(pid).memory_info().rss == 0
        assert resource_usage.measure_usage(pid).memory_bytes >= (48 << 20) + 40 * SOCKET_BYTES


@pytest.mark.parametrize(("code", "charged"), [("", False), ("import time; time.sleep(60)", True)], ids=["ended", "alive"])
def test_who_shows_no_descriptors_is_charged_for_many(monkeypatch: pytest.MonkeyPatch, code: str, charged: bool):
    """A running process with unreadable descriptors is charged at least HIDDEN_BYTES, one that has
    ended nothing. To users other than root, the kernel answers EACCES for an unreadable program and
    for one that ended and was not waited for."""
    listed = os.listdir

    def listdir(path: str) -> list[str]:
        if path.endswith("/fd"):
            raise PermissionError(path)
        return listed(path)

    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | (os.WNOHANG if charged else 0))
        monkeypatch.setattr(os, "listdir", listdir)
        found = resource_usage.measure_usage(process.pid).memory_bytes
        assert (found >= resource_usage.HIDDEN_BYTES) == charged and (charged or found == 0)
    finally:
        process.kill()
        process.wait()


def test_a_process_that_is_gone_is_over_no_limit():
    process = subprocess.Popen(["true"])
    process.wait()
    with pytest.raises(OSError, match="No such"):
        resource_usage.measure_usage(process.pid)
    assert resource_usage.find_exceeded_limit(process.pid, limits=BoxLimits(), shared_bytes=0, count_mappings=True) is None


def test_the_kernels_memory_is_told_when_it_grows(monkeypatch: pytest.MonkeyPatch):
    """The monitor reports growth of the kernel's memory by more than an eighth of a box's limit
    since the lowest value seen, or since the last report."""
    seen = iter([1000, 1080, 1081, 1100, 1162, 900, 985])
    monkeypatch.setattr(resource_usage, "read_unreclaimable_bytes", lambda: next(seen))
    slab = resource_usage.KernelMemoryMonitor(BoxLimits(memory=640))
    assert [slab.has_grown() for _ in range(6)] == [False, True, False, True, False, True]


def test_the_kernels_memory_is_read():
    assert 1 << 20 < resource_usage.read_unreclaimable_bytes() < psutil.virtual_memory().total
