"""Tests `python -m megatron_rl_sandbox serve` from the command line: its token, its open files, and honest
calls in real boxes during hostile requests."""

import asyncio
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import create_connection, socket

import httpx
import pytest

from megatron_rl_sandbox import CallResult, Fault, SandboxAccessDenied, SandboxError
from megatron_rl_sandbox.fusion_client import FusionSandbox
from megatron_rl_sandbox.layers import choose_layers, detect_layers
from megatron_rl_sandbox.sandbox_client import SandboxClient
from tests.conftest import ROOT
from tests.support.fake_sandbox_server import build_request

TOKEN = "a-word-of-thirty-two-characters!"
SERVE = (sys.executable, "-m", "megatron_rl_sandbox", "serve", "--port", "0", "--size", "2")


@contextmanager
def server(folder: Path, *words: str, open_files: int | None = None) -> Iterator[tuple[str, Path]]:
    """Yield the server's address and the file of its stderr."""
    try:
        choose_layers(detect_layers())
    except SandboxError as reason:
        pytest.skip(str(reason))
    log = folder / "log"
    limit = None if open_files is None else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
    with log.open("wb") as written:
        process = subprocess.Popen([*SERVE, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=written, text=True, preexec_fn=limit)
    with process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), log
        finally:
            process.terminate()
            assert process.wait(120) == 0


def connected(url: str) -> socket:
    host, port = url.removeprefix("http://").split(":")
    return create_connection((host, int(port)), timeout=30)


def test_an_address_for_all_takes_a_token(tmp_path: Path) -> None:
    """Finding 14: the server refuses a `--host` that other machines can reach unless a valid token
    is given. Formerly any `--host` was accepted silently."""

    def told(*words: str) -> tuple[int, str]:
        done = subprocess.run([*SERVE, *words], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
        return done.returncode, done.stderr

    code, said = told("--host", "0.0.0.0")
    assert code == 1
    assert said == "sandbox serve: --host 0.0.0.0: without a token, any client may run code: set --token-file FILE or --host 127.0.0.1\n"
    (tmp_path / "word").write_text("short")
    code, said = told("--host", "0.0.0.0", "--token-file", str(tmp_path / "word"))
    assert code == 1 and said.startswith(
        f"sandbox serve: {tmp_path}/word: a token must consist of 16 to 256 characters without spaces; create one: "
    )


def test_who_knows_the_token_runs_code_and_nobody_else(tmp_path: Path) -> None:
    (tmp_path / "word").write_text(TOKEN)

    async def asks(url: str, token: str) -> str:
        async with SandboxClient(url, token=token) as pool, await pool.open() as box:
            return (await box.run("print(6 * 7)")).text

    async def asks_as_fusion(url: str, token: str) -> CallResult:
        async with FusionSandbox(url, token=token) as pool, await pool.open() as box:
            return await box.run("print(6 * 7)")

    with server(tmp_path, "--host", "0.0.0.0", "--token-file", str(tmp_path / "word")) as (address, log):
        url = address.replace("0.0.0.0", "127.0.0.1")
        assert asyncio.run(asks(url, TOKEN)) == "42\n"
        assert asyncio.run(asks_as_fusion(url, TOKEN)).text == "42\n"
        for token in ("", TOKEN + "x"):
            with pytest.raises(
                SandboxAccessDenied, match=r"status 401 \(.*this server requires a token.*; use the token of its --token-file"
            ):
                asyncio.run(asks(url, token))
            assert asyncio.run(asks_as_fusion(url, token)).fault is Fault.HOST
        assert TOKEN not in log.read_text()


def test_more_connections_than_open_files_are_no_trouble(tmp_path: Path) -> None:
    """Finding 8 as reported: with 300 open files and 400 connections without a header, the server
    responds and logs nothing. Formerly it was unresponsive and wrote 500,000 tracebacks in a
    minute."""
    with server(tmp_path, open_files=300) as (url, log), ExitStack() as lines:
        for _ in range(400):
            lines.enter_context(connected(url))
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200
        time.sleep(1.0)
        assert log.read_text() == ""


FLOOD = """
import socket, sys, time
host, port = sys.argv[1].removeprefix("http://").split(":")
kept, end = [], time.monotonic() + 2.0
while time.monotonic() < end:
    begun = socket.socket()
    begun.setblocking(False)
    begun.connect_ex((host, int(port)))
    kept = [*kept[-99:], begun]
"""


def test_a_flood_of_connections_leaves_it_files(tmp_path: Path) -> None:
    """A flood of connections from two processes at full speed does not use up the server's open
    files. Connections arrive faster than those closed in their favor release their files."""
    with server(tmp_path, open_files=300) as (url, log):
        floods = [subprocess.Popen([sys.executable, "-c", FLOOD, url]) for _ in range(2)]
        assert [flood.wait(60) for flood in floods] == [0, 0]
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200 and log.read_text() == ""


def test_a_server_with_too_few_open_files_does_not_start() -> None:
    limit = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (150, 150)); "
        "from megatron_rl_sandbox.__main__ import main; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", limit, *SERVE[3:]], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("sandbox serve: ulimit -Hn is 150, but the server needs at least ")


def test_hostile_requests_make_no_call_late(tmp_path: Path) -> None:
    """Finding 7: hostile requests do not make an honest call late. During junk requests, a call of
    3 s formerly ended as `code / time` after 14 s."""
    junk = json.dumps({f"k{number}": 1 for number in range(300_000)}).encode()
    with server(tmp_path) as (url, log), ExitStack() as lines:

        async def honest() -> CallResult:
            async with SandboxClient(url) as pool, await pool.open() as box:
                call = asyncio.create_task(box.run("import time\nfor n in range(20): time.sleep(0.1)\nprint('answer 42')"))
                await asyncio.sleep(0.3)
                await asyncio.to_thread(flood)
                return await call

        def flood() -> None:
            for _ in range(3):
                lines.enter_context(connected(url)).sendall(build_request("/boxes", junk))
                lines.enter_context(connected(url)).sendall(build_request("/boxes", b"{", length=100_000_000))
            for _ in range(100):
                lines.enter_context(connected(url)).sendall(b"POST /run_code HT")

        result = asyncio.run(honest())
        assert (result.fault, result.text) == (Fault.NONE, "answer 42\n"), result
        assert log.read_text() == ""
