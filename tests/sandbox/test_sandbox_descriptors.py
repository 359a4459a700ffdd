"""Tests a pool in a process that may open few files: it is refused at the start or, if descriptors
run out later, leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

PRELUDE = '''
import asyncio, json, os, resource, sys, tempfile
import psutil
from megatron_rl_sandbox import SandboxError, SandboxPool

def held():
    return [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]

def take_all():
    """Every descriptor that this process may still have."""
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return taken

def left():
    me = psutil.Process()
    streams = [link for link in held() if "memfd" in link or "socket" in link]
    return {"children": len(me.children(recursive=True)), "folders": os.listdir(tempfile.gettempdir()), "streams": streams}
'''


def told(tmp_path: Path, code: str, *, soft: int, hard: int) -> Any:
    """Run `code` in a process with these limits on open files and its own temporary directory.
    Return the last line that it prints, parsed as JSON."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
    done = subprocess.run(
        [sys.executable, "-c", limit + PRELUDE + code],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_a_pool_too_large_for_its_process_is_refused_at_the_start(tmp_path: Path):
    """A pool that needs more open files than the hard limit allows does not start. The error names
    both numbers."""
    code = """
async def main():
    pool = SandboxPool(size=40, isolation="none")
    try:
        await pool.start()
    except SandboxError as fault:
        await pool.close()
        return {"fault": str(fault), **left()}
print(json.dumps(asyncio.run(main())))
"""
    seen = told(tmp_path, code, soft=100, hard=100)
    assert seen["fault"].startswith("size=40: the pool needs ")
    assert "ulimit -Hn is 100:" in seen["fault"]
    assert 120 < int(seen["fault"].split()[4]) < 300
    assert (seen["children"], seen["folders"]) == (0, [])


def test_the_soft_limit_is_raised_as_far_as_the_pool_needs(tmp_path: Path):
    code = """
async def main():
    async with SandboxPool(size=40, isolation="none") as pool:
        boxes = [await pool.open() for _ in range(40)]
        texts = {(await box.run("print(1)")).text for box in boxes}
        return {"texts": list(texts), "limit": resource.getrlimit(resource.RLIMIT_NOFILE)}
print(json.dumps(asyncio.run(main()) | left()))
"""
    seen = told(tmp_path, code, soft=100, hard=400)
    assert seen["texts"] == ["1\n"]
    assert 120 < seen["limit"][0] < 300
    assert seen["limit"][1] == 400
    assert (seen["children"], seen["folders"], seen["streams"]) == (0, [], [])


def test_files_that_run_out_later_are_the_hosts_fault_and_leave_nothing(tmp_path: Path):
    """With 0 to 5 descriptors left, opening a box fails at each of its steps with a SandboxError.
    The pool is then closed with none left, and no process, folder or stream remains."""
    code = """
async def main():
    faults = []
    async with SandboxPool(size=2, isolation="none") as pool:
        for spared in range(6):
            await asyncio.gather(*pool._spare_interpreters.values())
            await (await pool.open()).close()  # uses the prepared processes up, so that the next has to be made
            for task in pool._spare_interpreters.values():
                life = await task
                if life is not None:
                    await pool._end_interpreter(life)
            pool._spare_interpreters.clear()
            before = held()
            taken = take_all()
            for descriptor in taken[:spared]:
                os.close(descriptor)
            try:
                box = await pool.open()
                faults.append(None)
                await box.close()
            except SandboxError as fault:
                faults.append(str(fault))
            await asyncio.gather(*pool._spare_interpreters.values())
            for descriptor in taken[spared:]:
                os.close(descriptor)
        box = await pool.open()
        text = (await box.run("print(1)")).text
        taken = take_all()
    for descriptor in taken:
        os.close(descriptor)
    return {"faults": faults, "text": text}
print(json.dumps(asyncio.run(main()) | left()))
"""
    seen = told(tmp_path, code, soft=100, hard=100)
    assert seen["faults"][0] == "cannot start a process for a box: [Errno 24] Too many open files"
    assert seen["text"] == "1\n"
    assert (seen["children"], seen["folders"], seen["streams"]) == (0, [], [])
