"""Tests whose fault a failed call is: a failure of the pool or the host is never the code's fault,
and code cannot make its own failure the host's fault."""

import asyncio
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from megatron_rl_sandbox import BoxLimits, CallResult, Fault, SandboxError, SandboxPool, zygote_manager
from megatron_rl_sandbox.layers import choose_layers, detect_layers
from tests.support.sandbox_pool import PoolRunner, start_pool

LIMITS = BoxLimits(call_timeout_s=1.0, memory=192 << 20, disk=8 << 20, file=4 << 20)
ASK_KERNEL = """
import ctypes, os, resource
libc = ctypes.CDLL(None, use_errno=True)
def ask(number, *arguments):
    ctypes.set_errno(0)
    libc.syscall(ctypes.c_long(number), *(ctypes.c_long(item) if isinstance(item, int) else item for item in arguments))
    return os.strerror(ctypes.get_errno())
from_kernel = (ctypes.c_int * 32)()
"""
CHANNEL = "import gc, socket, sys\nframes = sys.modules['megatron_rl_sandbox.frames']\n" + (
    "channel = next(o for o in gc.get_objects() if isinstance(o, socket.socket))\n"
)
FORGED = {"error": None, "limit": None, "dropped": [], "files": {}, "cpu_s": 0.0, "memory": 1}


@pytest.fixture(scope="module")
def room() -> Iterator[PoolRunner]:
    yield from start_pool(LIMITS, size=4)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + kind + body + struct.pack("!I", zlib.crc32(kind + body))


def bomb(side: int = 2000) -> bytes:
    """Return a PNG of 16 KB that inflates to 16 MB and whose last row has an invalid filter byte,
    9."""
    row = bytes(1 + 4 * side)
    header = struct.pack("!IIBBBBB", side, side, 8, 6, 0, 0, 0)
    data = zlib.compress(row * (side - 1) + b"\x09" + row[1:], 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


async def longest_gap(work: Awaitable[Any]) -> tuple[Any, float]:
    """Return the result of `work` and the most CPU seconds that this thread used between two turns
    of its event loop."""
    longest, last = 0.0, time.thread_time()

    async def beat() -> None:
        nonlocal longest, last
        while True:
            await asyncio.sleep(0.002)
            now = time.thread_time()
            longest, last = max(longest, now - last), now

    beating = asyncio.create_task(beat())
    done = await work
    beating.cancel()
    return done, longest


@pytest.mark.parametrize("num", [5, 300], ids=["as many as a call may return", "more"])
def test_a_reply_full_of_bombs_holds_nobody_else_up(room: PoolRunner, num: int):
    """A reply full of decompression bombs uses less than 0.1 s of the event loop, and a call in
    another box succeeds. Formerly 300 bombs took ten seconds of the loop. Five bombs, which are
    inflated, take a thread 0.2 s."""
    flood = (
        f"{CHANNEL}reply = {FORGED!r} | {{'id': 1, 'sources': ['show'] * {num}}}\nchannel.sendall(frames.pack_frame(reply, [png] * {num}))"
    )

    async def calls() -> tuple[list[CallResult], float]:
        async with await room.pool.open(files={"bomb": bomb()}) as hostile, await room.pool.open() as honest:
            await hostile.run("png = open('bomb', 'rb').read()")
            await honest.run("import time")
            flooding = flood.replace("'id': 1", "'id': 2")
            return await longest_gap(asyncio.gather(hostile.run(flooding), honest.run("time.sleep(0.5); print('answer')")))

    (hostile, honest), gap = room.run_coroutine(calls())
    assert (honest.fault, honest.text) == (Fault.NONE, "answer\n"), honest
    assert gap < 0.1
    if num > LIMITS.images:
        assert (hostile.fault, hostile.error.type) == (Fault.CODE, "InterpreterBroken")
        assert "300 byte strings, 5 allowed" in hostile.error.message
    else:
        reasons = [dropped.reason for dropped in hostile.dropped]
        assert ["announces" in reason for reason in reasons] == [True] * 3 + [False] * 2, reasons  # then the pixels of one call are used up


@pytest.mark.parametrize(
    "code",
    [
        "resource.setrlimit(resource.RLIMIT_CPU, (1, 1))",
        "resource.prlimit(0, resource.RLIMIT_CPU, (1, 1))",
        "resource.prlimit(os.getpid(), 15, (1, 1))",
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
        "from_kernel[0], from_kernel[2] = 9, 0x80\nprint(ask(129, os.getpid(), 9, from_kernel))\nraise ValueError",
        "from_kernel[0], from_kernel[2] = 19, 0x80\nprint(ask(129, os.getpid(), 19, from_kernel))\nraise ValueError",
        "from_kernel[0], from_kernel[2] = 9, 0x80\nprint(ask(424, os.pidfd_open(os.getpid()), 9, from_kernel, 0))\nraise ValueError",
    ],
    ids=["setrlimit", "prlimit", "RLIMIT_RTTIME", "core dumps", "SIGKILL as from the kernel", "SIGSTOP as from the kernel", "by pidfd"],
)
def test_code_cannot_end_itself_as_only_the_host_can(room: PoolRunner, code: str):
    """Code cannot lower limits at which the kernel kills or send itself a signal as the kernel. Its
    attempts are errors of the code, and the interpreter survives."""
    result, after = room.run_codes(
        ASK_KERNEL + code + "\nwhile True: pass", "print('lives', resource.getrlimit(resource.RLIMIT_CPU)[1] > 1)"
    )
    assert result.fault is Fault.CODE, result
    assert result.error.type in ("ValueError", "PermissionError"), result
    assert result.text in ("", "Operation not permitted\n")
    assert (after.text, after.state_lost) == ("lives True\n", False)


@pytest.mark.parametrize(
    "code",
    [
        "resource.setrlimit(resource.RLIMIT_STACK, (4096, 4096)); os.execv('/bin/true', ['true'])",
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20)); os.execv('/bin/true', ['true'])",
        "resource.setrlimit(resource.RLIMIT_DATA, (4096, 4096)); os.execv('/bin/true', ['true'])",
        "resource.setrlimit(resource.RLIMIT_STACK, (4096, 4096)); sys.setrecursionlimit(10**9)\n"
        "class A:\n  def __repr__(self): return repr(self)\nrepr(A())",
        "signal.signal(signal.SIGXFSZ, signal.SIG_DFL); resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); os.write(1, b'x')",
        "print(ask(222, 1, (ctypes.c_int * 16)(0, 0, 9), ctypes.byref(ctypes.c_int()))); time.sleep(0.1); 1 / 0",
        "r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, os.getpid()); fcntl.fcntl(r, 10, 9)\n"
        "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC); os.write(w, b'x'); time.sleep(0.1); 1 / 0",
        "threading.Thread(target=time.sleep, args=(9,)).start(); libc.syscall(60, 0)",
        "os.fork() or os.kill(1, 9); time.sleep(0.1); os.kill(os.getpid(), 9); 1 / 0",
    ],
    ids=["stack", "address space", "data", "stack overflow", "file size", "timer", "F_SETSIG", "first thread leaves", "kill"],
)
def test_whatever_else_kills_from_the_kernel_is_the_codes_fault(room: PoolRunner, code: str):
    """A death by any other limit, timer or signal that code can cause is the code's fault."""
    (result,) = room.run_codes(ASK_KERNEL + "import fcntl, signal, sys, threading, time\n" + code)
    assert result.fault is Fault.CODE, result


def test_a_limit_of_processor_time_of_its_own_is_seen_without_seccomp_too():
    """Without seccomp, code that lowers its own RLIMIT_CPU and is killed is at fault. A kill by the
    host is still a host fault."""

    async def calls() -> list[CallResult]:
        layers = replace(choose_layers(detect_layers()), seccomp=False)
        async with SandboxPool(size=1, limits=LIMITS, layers=layers) as pool, await pool.open() as box:
            killed = await box.run("import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass", timeout_s=60)
            sleeping = asyncio.create_task(box.run("import time; time.sleep(30)", timeout_s=60))
            await asyncio.sleep(0.5)
            os.kill(box.interpreter.pid, signal.SIGKILL)
            return [killed, await sleeping]

    killed, by_host = asyncio.run(calls())
    assert (killed.fault, killed.error.type) == (Fault.CODE, "InterpreterDied"), killed
    assert "processor time of its own" in killed.error.message
    assert by_host.fault is Fault.HOST, by_host


def test_a_held_up_loop_is_no_limit_of_the_codes(room: PoolRunner):
    """A call whose work is done in time succeeds although the pool's event loop stalls for twice
    the limit at once, or before every snapshot of the clock."""

    async def calls(*stalls: float) -> CallResult:
        async with await room.pool.open() as box:
            await box.run("import time")
            call = asyncio.create_task(box.run("time.sleep(0.5); print('answer', flush=True)"))
            for stall in stalls:
                await asyncio.sleep(0.01)
                time.sleep(stall)
            return await call

    for stalls in ((2.0,), (0.3, 0.3, 0.3, 0.3, 0.3)):
        result = room.run_coroutine(calls(*stalls))
        assert (result.fault, result.text) == (Fault.NONE, "answer\n"), result


def test_a_process_with_no_name_in_unicode_has_a_clock_too(room: PoolRunner):
    """The clock works for a process whose name is not valid Unicode."""
    rename = "import ctypes\nctypes.CDLL(None).prctl(15, b')\\xff\\xfe) T 1', 0, 0, 0)\n"
    (result,) = room.run_codes(rename + "while True: pass")
    assert (result.fault, result.limit) == (Fault.CODE, "time")


def test_an_endless_call_is_the_codes_fault_after_a_stall_too(room: PoolRunner):
    async def calls() -> CallResult:
        async with await room.pool.open() as box:
            call = asyncio.create_task(box.run("while True: pass"))
            await asyncio.sleep(0.2)
            time.sleep(1.5)
            return await call

    result = room.run_coroutine(calls())
    assert (result.fault, result.limit) == (Fault.CODE, "time")


def test_a_stopped_box_is_the_hosts_fault_and_one_that_goes_on_is_nobodys(room: PoolRunner):
    """A box that the host stops for good is a host fault. A box that is continued after two seconds
    finishes its call."""

    async def calls(*, stopped_s: float | None) -> list[CallResult]:
        async with await room.pool.open() as box:
            await box.run("import time")
            call = asyncio.create_task(box.run("time.sleep(0.3); print('answer')"))
            await asyncio.sleep(0.1)
            os.kill(box.interpreter.pid, signal.SIGSTOP)
            if stopped_s is not None:
                await asyncio.sleep(stopped_s)
                os.kill(box.interpreter.pid, signal.SIGCONT)
            return [await call, await box.run("print(1)")]

    went_on, _ = room.run_coroutine(calls(stopped_s=2.0))
    assert (went_on.fault, went_on.text) == (Fault.NONE, "answer\n"), went_on
    stopped, after = room.run_coroutine(calls(stopped_s=None))
    assert stopped.fault is Fault.HOST
    assert "stopped from outside" in stopped.error.message
    assert (after.text, after.state_lost) == ("1\n", True)


def test_opening_is_not_late_by_our_stall(room: PoolRunner):
    """An open within its limit succeeds although the event loop stalls for 2.5 s."""

    async def opened() -> str:
        async with SandboxPool(size=1, limits=replace(LIMITS, open_timeout_s=1.0)) as pool:
            opening = asyncio.create_task(pool.open(preload="import time; time.sleep(0.3)"))
            while not pool._opening_interpreters:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)
            time.sleep(2.5)
            async with await opening as box:
                return (await box.run("print('open')")).text

    assert room.run_coroutine(opened()) == "open\n"


def test_a_kill_by_the_host_after_the_codes_own_used_up_memory(room: PoolRunner):
    """A kill by the host is a host fault even after the code's own out-of-memory kills. In the
    first call, the box's children are killed for lack of memory; in the second, the host kills the
    box."""
    if not room.pool.layers.cgroup:
        pytest.skip("no control group on this host")
    greedy = (
        "import os\nfor k in range(6):\n  if os.fork() == 0:\n    held = bytearray(b'x') * (90 << 20)\n    __import__('time').sleep(0.4)\n"
        "    os._exit(0)\nprint(9 in [os.wait()[1] for _ in range(6)])"
    )

    async def calls() -> list[CallResult]:
        async with await room.pool.open() as box:
            first = await box.run(greedy, timeout_s=20)
            call = asyncio.create_task(box.run("import time; time.sleep(30)", timeout_s=60))
            await asyncio.sleep(0.3)
            os.kill(box.interpreter.pid, signal.SIGKILL)
            return [first, await call]

    first, second = room.run_coroutine(calls())
    assert (first.fault, first.text) == (Fault.NONE, "True\n"), first
    assert second.fault is Fault.HOST, second


def test_a_killed_box_whose_end_is_told_late_is_the_hosts_fault(room: PoolRunner):
    """A kill by the host is a host fault even if the channel closes before the zygote reports the
    death. The code is not blamed for the closed channel."""

    async def calls() -> CallResult:
        async with await room.pool.open() as box:
            call = asyncio.create_task(box.run("import time; time.sleep(30)", timeout_s=60))
            await asyncio.sleep(0.2)
            zygote = room.pool._zygote._process
            zygote.send_signal(signal.SIGSTOP)
            os.kill(box.interpreter.pid, signal.SIGKILL)
            await asyncio.sleep(zygote_manager.EXIT_POLL_S + 0.5)
            zygote.send_signal(signal.SIGCONT)
            return await call

    result = room.run_coroutine(calls())
    assert result.fault is Fault.HOST, result


def test_a_stopped_zygote_is_given_up(room: PoolRunner, monkeypatch: pytest.MonkeyPatch):
    """A stopped zygote does not block an open forever. The boxes that it cannot kill die with it,
    and the next open starts a new zygote."""
    monkeypatch.setattr(zygote_manager, "ZYGOTE_REPLY_TIMEOUT_S", 1.5)

    async def stop() -> subprocess.Popen[bytes]:
        for spare in await asyncio.gather(*room.pool._spare_interpreters.values()):
            if spare is not None:  # prepared on the zygote that died
                spare.close()
        room.pool._spare_interpreters.clear()
        zygote = room.pool._zygote._process
        zygote.send_signal(signal.SIGSTOP)
        return zygote

    async def calls() -> tuple[list[Any], CallResult, list[bool], str]:
        async with await room.pool.open() as box:
            first = await stop()
            endless = await box.run("while True: pass")
        async with await room.pool.open():
            second = await stop()
            failed = await asyncio.gather(*(room.pool.open() for _ in range(3)), return_exceptions=True)
        async with await room.pool.open() as box:
            text = (await box.run("print('new')")).text
            return failed, endless, [zygote.poll() is not None for zygote in (first, second)], text

    failed, endless, dead, text = room.run_coroutine(asyncio.wait_for(calls(), 120))
    assert all(isinstance(one, SandboxError) for one in failed), failed
    assert (endless.fault, endless.limit, dead, text) == (Fault.CODE, "time", [True, True], "new\n")


OWNER = """
import asyncio
from megatron_rl_sandbox import SandboxPool

async def work():
    async with SandboxPool(size=1) as pool, await pool.open() as box:
        call = asyncio.create_task(box.run("while True: pass", timeout_s=60))
        await asyncio.sleep(0.2)
        print(pool._zygote._process.pid, box.interpreter.pid, flush=True)
        await call

asyncio.run(work())
"""


def test_a_stopped_zygote_does_not_outlive_its_pool(room: PoolRunner):
    """A stopped zygote and its boxes end when the process of the pool is killed."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    zygote, box = (psutil.Process(int(number)) for number in owner.stdout.readline().split())
    zygote.suspend()
    owner.kill()
    owner.wait()
    assert not psutil.wait_procs([zygote, box], timeout=10)[1]


def test_output_cannot_be_sealed(room: PoolRunner, monkeypatch: pytest.MonkeyPatch):
    """Code cannot seal its output files, and the output of the next call is intact. If
    vm.memfd_noexec is set, every holder of a memfd may seal it; here sealing is requested
    explicitly."""
    make = os.memfd_create
    monkeypatch.setattr(os, "memfd_create", lambda name, flags: make(name, flags | os.MFD_ALLOW_SEALING))

    async def calls() -> list[CallResult]:
        async with SandboxPool(size=1, limits=LIMITS) as pool, await pool.open() as box:
            seal = "import fcntl\nfor fd in (1, 2):\n  try: fcntl.fcntl(fd, 1033, 0xE)\n  except PermissionError: print('refused')"
            return [await box.run(seal), await box.run("print('next')")]

    first, second = asyncio.run(calls())
    assert first.text == "refused\nrefused\n"
    assert (second.fault, second.text) == (Fault.NONE, "next\n")
