"""Tests the tokens of services that a run starts itself: the run knows them, but its settings and
the command lines of its processes do not contain them."""

import asyncio
import os
import socket
import stat
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import psutil
import pytest

from megatron_rl.clients.sandbox_service import make_sandbox_client
from megatron_rl.config import (
    JudgeSettings,
    ModelSettings,
    RunSettings,
    SandboxSettings,
    ServiceSettings,
    ServicesSettings,
    Settings,
    TaskSettings,
)
from megatron_rl.distributed.world import connect, disconnect, read_world
from megatron_rl.errors import InfraError
from megatron_rl.rewards.judge import Judge
from megatron_rl.services.address import can_prove_token, find_address, is_service_running, token_file
from megatron_rl.services.service_launcher import LaunchedService, resolve_addresses, run_services
from megatron_rl_sandbox import SandboxError, SandboxPool
from megatron_rl_sandbox.access import CHALLENGE_HEADER, PROOF_HEADER, compute_proof
from megatron_rl_sandbox.sandbox_client import SandboxClient
from megatron_rl_sandbox.token import write_token
from tests.support import fake_judge_server


def test_the_runs_own_sandbox_asks_for_a_word_that_only_the_run_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox of the run requires a token that is in no command line, log, setting or published
    address. It rejects other tokens with 401."""
    monkeypatch.setenv("OPENAI_API_KEY", "the-judges-own")
    task = TaskSettings(name="vqa", sandbox=SandboxSettings(url="service:sandbox"))
    services = ServicesSettings(sandbox=ServiceSettings(kind="sandbox", args=["--size", "1"]))
    settings = Settings(model=ModelSettings(path="m"), run=RunSettings(dir=str(tmp_path)), task=task, services=services)
    connect(read_world(), timeout_s=30)
    try:
        _needs_room()
        with run_services(settings, read_world(), raise_if_stopped=lambda: None) as urls:
            file = token_file(tmp_path, "sandbox")
            token = file.read_text()
            assert stat.S_IMODE(os.stat(file).st_mode) == 0o600 and len(token) >= 32
            assert find_address(tmp_path, "sandbox", "sandbox") == urls["sandbox"]
            found = resolve_addresses(task, urls, run=tmp_path).sandbox
            assert (found.url, found.token_file) == (urls["sandbox"], str(file))
            assert task.sandbox.token_file == "", "what is kept with the run names no file of today"
            assert asyncio.run(_says(make_sandbox_client(found))) == "42\n"
            with pytest.raises(SandboxError, match="401"):
                asyncio.run(_says(SandboxClient(found.url)))
            assert httpx.get(f"{found.url}/health", headers={"Authorization": "Bearer the-judges-own"}).status_code == 401
            lines = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
            assert lines and not [line for line in lines if token in line]
            assert token not in (tmp_path / "services" / "sandbox.log").read_text() + (tmp_path / "services" / "sandbox.json").read_text()
        assert not file.exists()
    finally:
        disconnect()


def _needs_room() -> None:
    async def once() -> None:
        async with SandboxPool(size=1):
            pass

    try:
        asyncio.run(once())
    except SandboxError as reason:
        pytest.skip(str(reason))


async def _says(client: SandboxClient) -> str:
    async with client as pool, await pool.open() as box:
        return (await box.run("print(6 * 7)")).text


def test_a_token_that_is_none_is_told_under_its_setting(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^task.sandbox.token_file={tmp_path}/word: .*No such file"):
        make_sandbox_client(SandboxSettings(url="http://127.0.0.1:9", token_file=str(tmp_path / "word")))
    with pytest.raises(
        ValueError, match=r"^task.sandbox.token_file=word: has no effect without task.sandbox.url; set the URL of the server$"
    ):
        SandboxSettings(token_file="word")


def thieves(folder: Path, stolen: list[str], *, stop: threading.Event) -> None:
    """Act as another user of this machine: read the port from the process list, bind it first, and
    record what is received."""
    while not stop.is_set():
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if str(folder) not in " ".join(words) or "--port" not in words:
                continue
            with suppress(OSError), socket.create_server(("127.0.0.1", int(words[words.index("--port") + 1]))) as trap:
                trap.settimeout(0.2)
                while not stop.is_set():
                    with suppress(TimeoutError), trap.accept()[0] as line:
                        stolen.append(line.recv(4096).decode())
                        line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        time.sleep(0.02)


def processes_of(command: list[str]) -> list[psutil.Process]:
    """Return the descendants with this command; a supervisor starts it after its own imports."""
    return [each for each in psutil.Process().children(recursive=True) if each.cmdline()[1:3] == command[1:]]


@pytest.mark.parametrize("kind", ["vllm", "sandbox", "listener"])
def test_who_takes_a_services_port_first_gets_no_key_of_the_user(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding 2: a process that binds the port of a service first does not receive the user's API
    key. It does not receive the token either if the service is of a kind that proves that it knows
    its token, such as the sandbox."""
    for name in ("OPENAI_API_KEY", "VLLM_API_KEY"):
        monkeypatch.setenv(name, "sk-canary-of-the-user-0123456789")
    command = [sys.executable, "-c", f"import time; time.sleep(30)  # {tmp_path}"]
    given = ServiceSettings(kind=kind, model="" if kind == "sandbox" else "m", command=command)
    stolen, stop = [], threading.Event()
    thief = threading.Thread(target=thieves, args=(tmp_path, stolen), kwargs={"stop": stop})
    thief.start()
    service = LaunchedService("it", given, run=tmp_path, host="127.0.0.1")
    try:
        deadline = time.monotonic() + 20
        while (len(stolen) < 2 or not processes_of(command)) and time.monotonic() < deadline:
            service.poll()
            time.sleep(0.05)
        assert len(stolen) >= 2 and service.url == ""
        said, token = "".join(stolen), token_file(tmp_path, "it").read_text()
        assert "canary" not in said and (token in said) == (kind == "vllm")
        (process,) = processes_of(command)
        assert "canary" not in " ".join(process.environ().values())
    finally:
        stop.set()
        thief.join()
        service.stop()


async def judged(judge: Judge) -> None:
    assert await judge.score(fake_judge_server.PROMPT, fields=fake_judge_server.prompt_fields()) == 1.0


def test_a_judge_that_a_run_starts_has_a_key_of_its_own_and_is_asked_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to a judge of the run have its own key, and requests to other judges the user's. One
    token cannot serve both kinds of addresses."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary-of-the-user-0123456789")
    given = JudgeSettings(urls=["service:judge"], model="judge")
    with fake_judge_server.serve_judge(fake_judge_server.answer_correct) as server:
        token = write_token(token_file(tmp_path, "judge"))
        found = resolve_addresses(TaskSettings(name="vqa", judge=given), {"judge": server.url}, run=tmp_path).judge
        assert (found.urls, found.token_file) == ([server.url], str(token_file(tmp_path, "judge"))) and given.token_file == ""
        fake_judge_server.run_judge(found, judged)
        assert server.keys == {f"Bearer {token}"}
        fake_judge_server.run_judge(replace(found, token_file=""), judged)
        assert server.keys == {f"Bearer {token}", "Bearer sk-canary-of-the-user-0123456789"}
    with pytest.raises(InfraError, match=r"^task.judge.token_file=.*none: .*No such file"):
        fake_judge_server.run_judge(replace(found, token_file=str(tmp_path / "none")), judged)
    mixed = TaskSettings(name="vqa", judge=JudgeSettings(urls=["service:judge", "http://far/v1"]))
    services = ServicesSettings(judge=ServiceSettings(kind="vllm", model="m"))
    with pytest.raises(
        ValueError,
        match=r"^task.judge.urls=\['service:judge', 'http://far/v1'\]: must not mix services with other servers, because .* one token$",
    ):
        services.require_asked(mixed)


def test_a_judge_proves_itself_before_it_is_believed(tmp_path: Path) -> None:
    """A judge must prove that it knows its token before the token is sent. Formerly a process that
    bound the port first and read the nonce from the process list got the token and was accepted as
    the judge."""
    file = token_file(tmp_path, "judge")
    token, heard = write_token(file), []

    class Judge(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append((self.path, self.headers["Authorization"]))
            body = b'{"data": [{"id": "its-nonce"}]}'
            self.send_response(200)
            if knows:
                self.send_header(PROOF_HEADER, compute_proof(token, self.headers[CHALLENGE_HEADER] or "", port=self.server.server_port))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *given: object) -> None:
            """Suppress the log of requests."""

    for knows in (False, True):
        heard.clear()
        with HTTPServer(("127.0.0.1", 0), Judge) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{server.server_port}/v1"
            assert is_service_running(url, "vllm", nonce="its-nonce", token=file) is knows
            server.shutdown()
        assert heard == [("/health", None), *([("/v1/models", f"Bearer {token}")] if knows else [])]
    own = [ServiceSettings(kind=kind, model="" if kind == "sandbox" else "m") for kind in ("vllm", "sandbox", "listener")]
    assert all(map(can_prove_token, own)) and not can_prove_token(ServiceSettings(kind="vllm", model="m", command=["judge/bin/python"]))
