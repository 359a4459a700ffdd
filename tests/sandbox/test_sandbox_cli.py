"""Tests `python -m megatron_rl_sandbox run` and `doctor` as a user calls them: as root, without privileges, and
on a host that offers no isolation."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import ROOT
from tests.support.sandbox_pool import PoolRunner, start_pool

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")


@pytest.fixture(scope="module", autouse=True)
def room():
    """Skip the module if the host offers no isolation."""
    yield from start_pool(size=1)


def call(*command: object, prefix: tuple[object, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in (*prefix, sys.executable, *command)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def run_file(folder: Path, code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    (folder / "code.py").write_text(code)
    return call("-m", "megatron_rl_sandbox", "run", folder / "code.py", *arguments)


def test_a_file_sees_its_image_and_its_output_is_printed(tmp_path: Path):
    Image.new("RGB", (64, 48), "red").save(tmp_path / "in.jpg")
    code = "import os\nprint(image_0.size, os.listdir('.'))\nimage_0.crop((0, 0, 32, 30)).show()"
    done = run_file(tmp_path, code, "--image", tmp_path / "in.jpg", "--out", tmp_path / "out")
    assert (done.returncode, done.stdout) == (0, "(64, 48) ['image_0.jpg']\n"), done.stderr
    with Image.open(tmp_path / "out" / "0.png") as picture:
        assert picture.size == (32, 30)


def test_an_image_that_is_not_shown_is_missed(tmp_path: Path):
    """`run --out` warns if the code returns no image, and creates no folder."""
    Image.new("RGB", (64, 48), "red").save(tmp_path / "in.jpg")
    done = run_file(tmp_path, "image_0.rotate(90)", "--image", tmp_path / "in.jpg", "--out", tmp_path / "out")
    assert done.returncode == 0 and "the code returned no image" in done.stderr and ".show()" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("code", "status", "word"),
    [
        ("print('first')\n1/0", 1, "ZeroDivisionError"),
        ("print('first', flush=True)\nwhile True: pass", 2, "longer than 1 s"),
        ("print('first', flush=True)\nx = bytearray(1 << 40)", 2, "MemoryError"),
    ],
)
def test_exit_statuses(tmp_path: Path, code: str, status: int, word: str):
    """`run` exits with 1 for an error of the code and with 2 for a limit, and prints the output
    until then."""
    done = run_file(tmp_path, code, "--timeout", 1)
    assert (done.returncode, done.stdout) == (status, "first\n")
    assert word in done.stderr


def test_mistakes_of_the_caller(tmp_path: Path):
    """A missing or invalid input image leads to exit status 1 and an error, without running the
    code."""
    (tmp_path / "no.png").write_bytes(b"no image")
    for arguments in (("--image", tmp_path / "missing.png"), ("--image", tmp_path / "no.png")):
        done = run_file(tmp_path, "print(1)", *arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("sandbox run: ")


def test_the_doctor_reports_every_layer():
    done = call("-m", "megatron_rl_sandbox", "doctor")
    assert done.returncode == 0
    assert done.stdout.endswith("isolation: available\n")
    assert all(f"\n{name} " in done.stdout for name in ("mount_ns", "seccomp", "landlock", "cgroup", "drop_uid"))


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")
def test_a_host_without_room_is_refused_and_none_is_by_request_only(tmp_path: Path):
    """On a host that offers no isolation, `run` and `doctor` exit with 3; `--isolation none` runs
    the code. The host is a user namespace that allows no further user namespace and has no second
    uid."""
    prefix = ("unshare", "-Ur", "sh", "-c", 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"', "sh")
    (tmp_path / "code.py").write_text("print(6 * 7)")
    done = call("-m", "megatron_rl_sandbox", "run", tmp_path / "code.py", prefix=prefix)
    assert (done.returncode, done.stdout) == (3, "")
    assert "offers no isolation (drop_uid: " in done.stderr
    done = call("-m", "megatron_rl_sandbox", "doctor", prefix=prefix)
    assert done.returncode == 3
    assert 'isolation="none"' in done.stdout
    done = call("-m", "megatron_rl_sandbox", "run", tmp_path / "code.py", "--isolation", "none", prefix=prefix)
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


@AS_ROOT
def test_a_user_without_privilege_gets_a_room(room: PoolRunner):
    """Without privileges, a box is isolated by namespaces and the watchdog. The results of scripted
    calls equal the expected faults and limits."""
    done = call(ROOT / "tests/support/unprivileged.py", sys.executable, ROOT / "tests/support/sandbox_calls.py")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert {"user_ns", "mount_ns", "net_ns", "pid_ns", "seccomp", "watchdog"} <= set(seen["layers"])
    assert "drop_uid" not in seen["layers"]
    assert [seen[name][:2] for name in ("network", "files", "write", "input", "replace")] == [
        ["code", "PermissionError"],
        ["code", "FileNotFoundError"],
        ["code", "OSError"],
        ["code", "OSError"],
        ["code", "OSError"],
    ]
    assert seen["image"] == ["none", None, None, "", 1]
    assert seen["namespace"][2] == "system call"
    assert seen["shared"][1:3] == ["OSError", "memory"]  # shared memory cannot be counted here
    assert seen["memory"][:3] == ["code", "LimitExceeded", "memory"]
    assert seen["processes"][2] == "processes"
    assert seen["time"][:3] == ["code", "LimitExceeded", "time"]
    assert seen["after"] == ["none", None, None, "1 1000\n", 0]


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")
def test_a_fork_that_the_kernel_refuses_is_the_hosts_fault_and_the_zygote_lives():
    """If the kernel refuses a namespace, `open` raises SandboxError each time, the zygote survives,
    and no slot is taken."""
    code = (
        "import asyncio, sandbox\n"
        "async def main():\n"
        "    async with sandbox.SandboxPool(size=1, layers=sandbox.Layers(pid_ns=True)) as pool:\n"
        "        for _ in range(2):\n"
        "            try: await pool.open()\n"
        "            except sandbox.SandboxError as fault: print(fault)\n"
        "        print(pool.num_open)\n"
        "asyncio.run(main())"
    )
    prefix = ("unshare", "-Ur", "sh", "-c", 'echo 0 > /proc/sys/user/max_pid_namespaces && exec "$@"', "sh")
    done = call("-c", code, prefix=prefix)
    refusal = "fork: [Errno 28] unshare(0x20000000): No space left on device"
    assert done.stdout.splitlines() == [refusal, refusal, "0"], done.stdout + done.stderr
