"""Tests the access control of vLLM servers over sockets: an application with the names of vLLM's
routes behind uvicorn, and vLLM's own argument parser.
"""

import argparse
import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request, WebSocket
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

from megatron_rl.config import EngineSettings
from megatron_rl.rollout.vllm.http_gate import ALLOWED_RPC, TOKEN_FILE
from megatron_rl.rollout.vllm.server_command import MIDDLEWARE, PROGRAM, launch_commands, server_arguments, server_environment
from megatron_rl.services.address import has_proven_token
from megatron_rl_sandbox.token import bearer_header

TOKEN = "a-word-of-many-letters"
CONTROL = (
    "/pause", "/resume", "/abort_requests", "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update",
    "/update_weights", "/finish_weight_update", "/update_weight_version", "/weight_checker", "/collective_rpc", "/reset_prefix_cache",
    "/reset_encoder_cache", "/sleep", "/wake_up", "/inference/v1/generate", "/v1/chat/completions", "/invocations",
)  # fmt: skip
ASKED = ("/health", "/version", "/weight_info", "/get_world_size", "/is_paused", "/metrics", "/docs", "/openapi.json", "/v1/models")
SOCKET = {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
PAGE = {"Host": "evil.example:18100", "Origin": "http://evil.example", "Content-Type": "text/plain;charset=UTF-8"}


@dataclass
class Served:
    url: str = ""
    reached: list[tuple[str, bytes]] = field(default_factory=list)
    """(path, body) of each request that passed the access control."""


def app_of(found: Served, *, middleware: list[str], host: str | None = "127.0.0.1") -> FastAPI:
    """Return an application with vLLM's route names behind the middleware that vLLM itself adds."""

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        yield

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.websocket("/v1/realtime")
    async def realtime(talk: WebSocket) -> None:
        await talk.accept()
        found.reached.append(("/v1/realtime", b""))

    @app.post("/{path:path}")
    @app.get("/{path:path}")
    async def any_route(request: Request) -> dict[str, str]:
        found.reached.append((request.url.path, await request.body()))
        return {}

    everything = {"allowed_origins": ["*"], "allow_credentials": False, "allowed_methods": ["*"], "allowed_headers": ["*"]}
    app.state.args = argparse.Namespace(middleware=middleware, host=host, api_key=None, enable_request_id_headers=False, **everything)
    init_entrypoints_middleware(app.state.args, app, ())
    return app


@contextmanager
def serving(*, middleware: list[str], host: str | None = "127.0.0.1") -> Iterator[Served]:
    found = Served()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app_of(found, middleware=middleware, host=host), log_level="critical"))

        def serve() -> None:
            with contextlib.suppress(SystemExit):  # the server does not start
                asyncio.run(server.serve(sockets=[listener]))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.01)
            found.url = f"http://127.0.0.1:{listener.getsockname()[1]}" if server.started else ""
            yield found
        finally:
            server.should_exit = True
            thread.join(20)


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "token"))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    return tmp_path / "token"


def test_each_route_asks_for_the_token(token_file: Path) -> None:
    """Every route requires the token. Without the middleware, and with only vLLM's own API key, the
    routes that control a server are open.
    """
    with serving(middleware=[MIDDLEWARE]) as server, httpx.Client(base_url=server.url) as http:
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": TOKEN}, bearer_header(TOKEN + "x")):
            assert {http.post(path, json={}, headers=headers).status_code for path in CONTROL} == {401}
            assert {http.get(path, headers=headers).status_code for path in ASKED} == {401}
        assert http.options("/pause").status_code == http.head("/health").status_code == 401
        assert server.reached == []
        assert {http.get(path, headers=bearer_header(TOKEN)).status_code for path in ASKED} == {200}
        assert {http.post(path, json=ALLOWED_RPC, headers=bearer_header(TOKEN)).status_code for path in CONTROL} == {200}
        assert [path for path, _ in server.reached] == [*ASKED, *CONTROL]


def test_a_web_page_does_nothing(token_file: Path) -> None:
    """Requests from a web page are refused even if they carry the token; each single header of a
    page is enough. Without the middleware, the same request succeeds.
    """
    with serving(middleware=[MIDDLEWARE]) as server, httpx.Client(base_url=server.url, headers=bearer_header(TOKEN)) as http:
        for left, code in ((PAGE, 421), ({**PAGE, "Host": "127.0.0.1"}, 403), ({"Content-Type": "text/plain"}, 415)):
            assert {http.post(path, content=b'{"method": "rl_fingerprint"}', headers=left).status_code for path in CONTROL} == {code}
        assert http.get("/version", headers={"Host": "evil.example"}).status_code == 421 and server.reached == []
    with serving(middleware=[]) as server:
        assert httpx.post(f"{server.url}/collective_rpc", content=b"{}", headers=PAGE).status_code == 200, "without the gate"


def test_the_worker_has_one_method(token_file: Path) -> None:
    """/collective_rpc allows only the method rl_fingerprint. Among the others, save_sharded_state
    writes files, and update_environment_variables sets variables that later programs read.
    """
    bodies = [
        {"method": "save_sharded_state", "args": ["/tmp/w", "owned"]}, {"method": "rl_fingerprint", "args": ["x"]},
        {**ALLOWED_RPC, "kwargs": {"a": "b"}}, {}, [], {"method": ["rl_fingerprint"]},
    ]  # fmt: skip
    with serving(middleware=[MIDDLEWARE]) as server, httpx.Client(base_url=server.url, headers=bearer_header(TOKEN)) as http:
        for path in ("/collective_rpc", "/collective_rpc/", "//collective_rpc"):
            assert {http.post(server.url + path, json=body).status_code for body in bodies} == {403}
        twice = b'{"method": "rl_fingerprint", "method": "save_sharded_state"}'
        for content in (twice, b"", b"{", b" " * 70_000 + b'{"method": "rl_fingerprint"}', b"\xff"):
            answer = http.post("/collective_rpc", content=content, headers={"Content-Type": "application/json"})
            assert answer.status_code == 403, content
        assert server.reached == []
        assert http.post("/collective_rpc", json=ALLOWED_RPC).status_code == 200
        assert [path for path, _ in server.reached] == ["/collective_rpc"] and server.reached[0][1] == b'{"method":"rl_fingerprint"}'


def test_a_websocket_is_closed(token_file: Path) -> None:
    with serving(middleware=[MIDDLEWARE]) as server:
        upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", **SOCKET}
        assert (
            httpx.get(f"{server.url}/v1/realtime", headers={**upgrade, **bearer_header(TOKEN)}).status_code == 403 and server.reached == []
        )


def test_it_proves_that_it_knows_the_token_and_has_the_name_that_it_listens_at(token_file: Path) -> None:
    with serving(middleware=[MIDDLEWARE], host="node2.cluster") as server:
        assert has_proven_token(server.url, token=TOKEN) and not has_proven_token(server.url, token=TOKEN + "x")
        assert httpx.get(f"{server.url}/health", headers={"Host": "node2.cluster:8000", **bearer_header(TOKEN)}).status_code == 200
    with serving(middleware=[MIDDLEWARE], host=None) as server:
        assert httpx.get(f"{server.url}/health", headers={"Host": "node2.cluster:8000", **bearer_header(TOKEN)}).status_code == 421
    with serving(middleware=[]) as server:
        assert not has_proven_token(server.url, token=TOKEN)


@pytest.mark.parametrize("text", [None, "short"])
def test_without_a_token_it_does_not_start(text: str | None, token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if text is None:
        monkeypatch.delenv(TOKEN_FILE)
    else:
        token_file.write_text(text)
    with serving(middleware=[MIDDLEWARE]) as server:
        assert server.url == ""


def test_the_command_has_the_gate_and_fetches_nothing(tmp_path: Path) -> None:
    """The arguments, read by vLLM's own parser, contain the access control and allow no downloads
    of media. The printed commands use 127.0.0.1 unless engine.urls names other hosts, and unset the
    user's API keys.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    sizes = {"banned_ids": [1], "pixels": (3136, 4000)}
    words = server_arguments("m", EngineSettings(), **sizes, cuda=False, seed=None, timeout_s=60.0)
    read = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    assert read.middleware == [MIDDLEWARE] and read.disable_fastapi_docs
    assert read.allowed_media_domains == ["none.invalid"] and not read.allowed_local_media_path
    assert server_environment(EngineSettings(), token_file="f")[TOKEN_FILE] == str(Path("f").absolute())
    file, urls = str(tmp_path / "a token"), ["http://node2:8000", "http://10.0.0.3:9"]
    alone = launch_commands("m", EngineSettings(token_file=file), **sizes, cuda=False)
    assert alone.endswith(" --seed $RANDOM --host 127.0.0.1 --port 8000") and f"'{TOKEN_FILE}={file}'" in alone
    assert alone.startswith("env -u OPENAI_API_KEY -u VLLM_API_KEY ") and " ".join(PROGRAM) in alone
    both = launch_commands("m", EngineSettings(mode="server", urls=urls, token_file=file), **sizes, cuda=False).splitlines()
    assert [line.partition(" --host ")[2] for line in both] == ["node2 --port 8000", "10.0.0.3 --port 9"]
    with pytest.raises(ValueError, match=r"^engine.token_file=: servers require a token file; .* > FILE; engine.token_file=FILE$"):
        launch_commands("m", EngineSettings(), **sizes, cuda=False)
