"""Tests what is killed and what is refused, whose fault it is, and that nothing of it stays on the
host."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from megatron_rl_sandbox import BoxClosed, BoxLimits, Fault, Layers, PoolFull, SandboxPool
from megatron_rl_sandbox.cgroups import find_own_groups
from tests.support.sandbox_pool import PoolRunner, snapshot_host, start_pool

LIMITS = BoxLimits(
    call_timeout_s=1.0, open_timeout_s=3.0, memory=256 << 20, processes=12, disk=8 << 20, inodes=64, file=4 << 20, code=100_000, cpu_s=2
)


@pytest.fixture(scope="module")
def room() -> Iterator[PoolRunner]:
    yield from start_pool(LIMITS, size=2)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and util-linux")
def test_a_pool_in_another_pid_namespace_leaves_this_one_alone():
    """The processes of this pool are not visible there, although both see the same control groups.
    The groups of this pool, which are empty before its first box, are kept."""
    if "memory" not in find_own_groups():
        pytest.skip("no control groups for memory")
    for pool in start_pool(LIMITS, size=2):
        groups = snapshot_host()["groups"]
        code = (
            "from megatron_rl_sandbox import BoxLimits, cgroups\ncgroups.ControlGroups(size=1, limits=BoxLimits()).close()\nprint('made')\n"
        )
        other = subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert other.stdout == "made\n", other.stderr
        assert groups and groups == snapshot_host()["groups"]
        (result,) = pool.run_codes("print(1)")
        assert (result.text, result.fault) == ("1\n", Fault.NONE)


@pytest.mark.parametrize(
    ("code", "limit", "message"),
    [
        ("print('before', flush=True)\nwhile True: pass", "time", "longer than 1 s"),
        ("import time\nprint('before', flush=True)\ntime.sleep(60)", "time", "longer than 1 s"),
        (
            "import signal, os\nfor n in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(n, signal.SIG_IGN)\n"
            "print('before', flush=True)\nfor k in range(3): os.fork()\nwhile True: pass",
            "time",
            "longer than 1 s",
        ),
        ("print('before', flush=True)\nimport ctypes\nctypes.CDLL(None).mount(0, 0, 0, 0, 0)", "system call", "system call"),
        (
            "print('before', flush=True)\nimport mmap, os\nfor k in range(8):\n  if os.fork() == 0:\n"
            "    m = mmap.mmap(-1, 200 << 20)\n    for p in range(0, 200 << 20, 4096): m[p] = 1\n    while True: pass\n"
            "m = mmap.mmap(-1, 400 << 20)\nfor p in range(0, 400 << 20, 4096): m[p] = 1",
            "memory|time",
            "memory|longer",
        ),
    ],
    ids=["loop", "sleep", "ignores signals", "system call", "shared memory"],
)
def test_a_kill_is_the_codes_fault_keeps_what_was_printed_and_loses_the_state(room: PoolRunner, code: str, limit: str, message: str):
    results = room.run_codes("x = 1; open('a', 'w').close()", code, "import os; print('x' in dir(), os.listdir('.'))", "print('y')")
    killed, fresh, later = results[1:]
    assert killed.fault is Fault.CODE
    assert re.fullmatch(limit, killed.limit)
    assert killed.error.type == "LimitExceeded"
    assert re.search(message, killed.error.message)
    assert killed.text == "before\n"
    assert (fresh.text, fresh.state_lost, fresh.fault) == ("False []\n", True, Fault.NONE)
    assert (later.text, later.state_lost) == ("y\n", False)


@pytest.mark.parametrize(
    ("code", "limit"),
    [
        ("a = bytearray(300 << 20)", "memory"),
        ("a = []\nwhile True: a.append(bytes(1 << 20))", "memory"),
        ("f = open('a', 'wb')\nfor k in range(9): f.write(bytes(1 << 20))\nf.flush()", "disk"),
        ("for k in range(3): open(f'a{k}', 'wb').write(bytes(4 << 20))", "disk"),
        ("for k in range(100): open(f'a{k}', 'w').close()", "disk"),
        ("while True: print('x' * 10**6)", "disk"),
        ("import os, time\nfor k in range(100):\n    if os.fork() == 0: time.sleep(9)", "processes"),
        ("import threading, time\nfor k in range(100): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()", "processes"),
    ],
    ids=["memory at once", "memory by and by", "one file", "files", "inodes", "output", "processes", "threads"],
)
def test_a_limit_that_can_be_an_exception_is_one_and_the_state_stays(room: PoolRunner, code: str, limit: str):
    """Limits that can raise an exception do so: the call reports the limit, and the state is
    kept."""
    results = room.run_codes("x = 1", code, "print(x)")
    assert (results[1].fault, results[1].limit) == (Fault.CODE, limit), results[1]
    assert (results[2].text, results[2].state_lost) == ("1\n", False), results[2]


def test_processor_time_is_bounded_in_total(room: PoolRunner):
    async def calls():
        async with await room.pool.open() as box:
            return [
                await box.run("import time\nend = time.process_time() + 0.8\nwhile time.process_time() < end: pass", timeout_s=30)
                for _ in range(4)
            ]

    results = room.run_coroutine(calls())
    assert [result.limit for result in results[:2]] == [None] * 2
    assert "cpu" in [result.limit for result in results[2:]], results


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(7)",
        "import ctypes; ctypes.string_at(0)",
        "import os; os.abort()",
        "import os; os.closerange(0, 200)",
        "import os\nfor n in range(3, 100):\n  try: os.write(n, b'nonsense' * 100)\n  except OSError: pass",
        "import gc, socket\ns = next(o for o in gc.get_objects() if isinstance(o, socket.socket))\ns.sendall(bytes([127] * 100))",
    ],
    ids=["exit", "segfault", "abort", "closes all", "nonsense", "long frame"],
)
def test_a_box_that_breaks_itself_is_at_fault_and_replaced(room: PoolRunner, code: str):
    """Code that ends or breaks its own interpreter is at fault. The next call runs in a fresh
    one."""
    broken, after = room.run_codes(code, "print('fine')")
    assert (broken.fault, broken.limit) == (Fault.CODE, None), broken
    assert broken.error.type in ("InterpreterDied", "InterpreterBroken")
    assert (after.text, after.state_lost) == ("fine\n", True)


def test_a_forged_reply_is_never_the_next_calls_answer(room: PoolRunner):
    """After a forged reply, the genuine one that arrives late is not used for the next call. That
    call is the code's fault, and the interpreter is replaced."""
    forge = (
        "import gc, socket, sys\nframes = sys.modules['megatron_rl_sandbox.frames']\n"
        "s = next(o for o in gc.get_objects() if isinstance(o, socket.socket))\n"
        "reply = {'id': 1, 'error': None, 'limit': None, 'sources': [], 'dropped': [], 'files': {}, 'cpu_s': 0.0, 'memory': 1}\n"
        "s.sendall(frames.pack_frame(reply))"
    )
    forged, next_, after = room.run_codes(forge, "print(2)", "print(3)")
    assert forged.fault is Fault.NONE
    assert (next_.fault, next_.error.type) == (Fault.CODE, "InterpreterBroken")  # the genuine reply to the first call arrived late
    assert (after.text, after.state_lost) == ("3\n", True)


def test_source_that_is_too_long_is_not_sent(room: PoolRunner):
    long, after = room.run_codes("#" * 10_000_000, "print(1)")
    assert (long.fault, long.limit, long.error.type) == (Fault.CODE, "code", "CodeTooLong")
    assert (after.text, after.state_lost) == ("1\n", False)


def bomb(side: int) -> bytes:
    """Return a PNG of a few kilobytes that decodes to a huge square."""
    buffer = BytesIO()
    Image.new("1", (side, side)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("inputs", "word"),
    [
        ({"images": {"image_0": bomb(9000)}}, "image_0.png: 9000x9000 pixels, more than the allowed 64000000"),
        ({"images": {"image_0": bomb(20_000)}}, "image_0.png: cannot be read: Image size .400000000 pixels. exceeds"),
        ({"images": {"image_0": bomb(3000)[:500]}}, "image_0.png: cannot be read: .*truncated"),
        ({"images": {"image_0": b"\x89PNG\r\n\x1a\n" + bytes(500)}}, "image_0.png: cannot be read"),
        ({"preload": "x = 1\nraise KeyError('no')"}, "preload: line 2: KeyError: 'no'"),
        (
            {"preload": "import time; time.sleep(60)"},
            "open_timeout_s",
        ),  # a busy loop would meet cpu_s first, or not, as the machine is loaded
        ({"preload": "import os; os._exit(3)"}, "died while opening .exit 3."),
    ],
    ids=["bomb", "huge bomb", "truncated", "damaged", "preload raises", "preload hangs", "preload exits"],
)
def test_a_box_that_cannot_be_opened_says_why_and_takes_no_place(room: PoolRunner, inputs: dict[str, Any], word: str):
    """A box with invalid inputs or a failing preload raises a ValueError with the reason, and takes
    no slot."""
    for _ in range(1 if word == "open_timeout_s" else 2):
        with pytest.raises(ValueError, match=word):
            room.run_coroutine(room.pool.open(**inputs))
    assert room.pool.num_open == 0
    assert room.run_codes("print(1)")[0].text == "1\n"


def test_a_full_pool_waits_or_says_so(room: PoolRunner):
    async def calls():
        boxes = [await room.pool.open() for _ in range(2)]
        with pytest.raises(PoolFull, match="all 2 boxes"):
            await room.pool.open(wait_s=0.05)
        waiting = asyncio.create_task(room.pool.open())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await boxes[0].close()
        late = await waiting
        assert (await late.run("print(1)")).text == "1\n"
        await boxes[1].close()
        await late.close()
        with pytest.raises(BoxClosed):
            await late.run("print(1)")
        await late.close()

    room.run_coroutine(calls())
    assert room.pool.num_open == 0


def test_a_cancelled_call_is_killed_and_others_go_on(room: PoolRunner):
    async def calls():
        async with await room.pool.open() as box, await room.pool.open() as other:
            call = asyncio.create_task(box.run("import time; time.sleep(30)", timeout_s=60))
            await asyncio.sleep(0.2)
            pid = box.interpreter.pid
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert not psutil.pid_exists(pid)
            result = await box.run("print(1)")
            return result.text, result.state_lost, (await other.run("print(2)")).text

    assert room.run_coroutine(calls()) == ("1\n", True, "2\n")


def test_calls_of_one_box_come_one_after_the_other(room: PoolRunner):
    """Concurrent calls of one box run in the order in which they were made."""

    async def calls():
        async with await room.pool.open() as box:
            return await asyncio.gather(*(box.run(f"import time; time.sleep(0.01); print({k})") for k in range(8)))

    results = room.run_coroutine(calls())
    assert [result.text for result in results] == [f"{k}\n" for k in range(8)]
    assert [result.id for result in results] == list(range(1, 9))


def test_closing_a_box_ends_its_call(room: PoolRunner):
    async def calls():
        box = await room.pool.open()
        call = asyncio.create_task(box.run("import time; time.sleep(30)", timeout_s=60))
        await asyncio.sleep(0.1)
        await box.close()
        with pytest.raises(BoxClosed):
            await call

    room.run_coroutine(calls())
    assert room.pool.num_open == 0


def test_a_pool_leaves_nothing(room: PoolRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A closed pool leaves nothing on the host, also after boxes that were killed, closed during a
    call, or left open."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def calls():
        async with SandboxPool(size=3, limits=LIMITS) as pool:
            image = Image.new("RGB", (50, 50))
            for _ in range(5):
                async with await pool.open(images={"image_0": image}, files={"a/b": b"c"}) as box:
                    await box.run("image_0.show(); open('x', 'w').write('x')")
                    await box.run("import os\nwhile True:\n  os.fork()", timeout_s=0.2)
                    await box.run("1/0")
            left = await pool.open()
            running = asyncio.create_task(left.run("while True: pass"))
            await asyncio.sleep(0.1)
        with pytest.raises(BoxClosed):
            await running

    async def settled():
        await asyncio.gather(*room.pool._spare_interpreters.values())

    room.run_coroutine(settled())
    before = snapshot_host()
    room.run_coroutine(calls())
    assert snapshot_host() == before


def test_none_is_only_none_when_told(room: PoolRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Without any isolation layer, a timeout still kills every process that the call started,
    including those with a session of their own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def calls():
        async with SandboxPool(size=1, limits=LIMITS, isolation="none") as pool, await pool.open(files={"a": b"a"}) as box:
            assert pool.layers == Layers()
            result = await box.run(
                "import os, subprocess, time\nsubprocess.Popen(['/bin/sh', '-c', 'setsid sleep 4321 & sleep 4321'])\n"
                "print(os.path.realpath('.'), flush=True)\ntime.sleep(60)"
            )
            return result, await box.run("print(open('a').read())")

    before = snapshot_host()
    killed, after = room.run_coroutine(calls())
    assert (killed.limit, after.text, after.state_lost) == ("time", "a\n", True)
    assert not os.path.exists(killed.text.strip())
    time.sleep(0.05)
    assert not [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", "4321"]]
    assert snapshot_host() == before


@pytest.mark.parametrize("layer", ["read_only_root", "private_tmp"])
def test_no_combination_of_layers_mounts_on_the_host(layer: str):
    with pytest.raises(ValueError, match="mount_ns"):
        Layers(**{layer: True})


@pytest.mark.parametrize("arguments", [{"size": 0}, {"size": 257}, {"isolation": "some"}, {"isolation": "none", "layers": Layers()}])
def test_a_pool_that_makes_no_sense_is_refused(arguments: dict[str, Any]):
    with pytest.raises(ValueError, match="size|some|isolation"):
        SandboxPool(**arguments)
