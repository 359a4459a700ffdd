"""Tests the bounded HTTP client against real servers on loopback that drip bytes, never end,
compress or redirect their responses."""

import asyncio
import re
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl_sandbox.bounded_http import BoundedClient, BoundedResponse, NoResponse, send_request
from tests.support.hostile_server import serve_hostile
from tests.support.json_server import server_url, start_server, stop_server

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S, SLACK_S = 0.4, 20.0
"""Time limit of a request, and the seconds that a busy machine may add. The hostile server itself
never finishes."""
CLIENTS = r"^\s*(?:from|import) (httpx2|httpx|openai|requests|aiohttp|urllib3|http\.client|urllib\.request)\b"


def in_loop(url: str, **more: object) -> BoundedResponse:
    async def main() -> BoundedResponse:
        async with BoundedClient(url) as client:
            return await client.request("GET", "/health", **{"timeout_s": LIMIT_S, "max_bytes": 1000, **more})

    return asyncio.run(main())


def in_thread(url: str, **more: object) -> BoundedResponse:
    return send_request("GET", f"{url}/health", **{"timeout_s": LIMIT_S, "max_bytes": 1000, **more})


FORMS = pytest.mark.parametrize("ask", [in_loop, in_thread])
Ask = Callable[..., BoundedResponse]


@FORMS
@pytest.mark.parametrize("way", ["body by drops", "head by drops", "silent"])
def test_an_answer_by_drops_ends_with_its_limit(way: str, ask: Ask) -> None:
    """A response whose body or head arrives in drops, or never, raises NoResponse at the limit of
    0.4 s."""
    with serve_hostile(way) as url:
        began = time.monotonic()
        with pytest.raises(NoResponse, match=r"^no complete response within 0.4 s$"):
            ask(url)
    assert LIMIT_S <= time.monotonic() - began < SLACK_S


@FORMS
@pytest.mark.parametrize(
    ("way", "line"),
    [
        ("endless", "the response has more than 1000 bytes"),
        ("long error", "the response has more than 1000 bytes"),
        ("packed", "the response is compressed ('gzip'), although no compression was requested"),
        ("packed twice", "the response is compressed ('identity, gzip'), although no compression was requested"),
    ],
)
def test_an_answer_that_is_too_long_or_compressed_is_not_read(way: str, line: str, ask: Ask) -> None:
    """A response longer than `max_bytes` or compressed raises NoResponse. Reading it takes less
    than 4 MiB of memory."""
    with serve_hostile(way) as url:
        ask_once = lambda: ask(url, timeout_s=SLACK_S)  # noqa: E731
        with pytest.raises(NoResponse) as first:  # imports and caches of a first call are not counted
            ask_once()
        tracemalloc.start()
        try:
            with pytest.raises(NoResponse) as error:
                ask_once()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert str(error.value) == str(first.value) == line and peak < 4 << 20


@FORMS
def test_no_redirect_is_followed_and_no_proxy_of_the_environment_asked(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """A redirect is returned as a 302 and not followed, and proxies of the environment are not
    used. The server that both point to receives no request."""
    asked: list[str] = []

    def answer(path: str, body: dict) -> tuple[int, object]:
        asked.append(path)
        return 200, {"from": "elsewhere"}

    other = start_server(answer)
    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, server_url(other))
    try:
        with serve_hostile("redirect", redirect_url=server_url(other)) as url:
            got = ask(url, timeout_s=SLACK_S)
    finally:
        stop_server(other)
    assert (got.status, got.is_success, asked) == (302, False, [])


@FORMS
def test_nobody_listens(ask: Ask) -> None:
    with pytest.raises(NoResponse, match=r"^ConnectError: "):
        ask("http://127.0.0.1:1", timeout_s=SLACK_S)
    with pytest.raises(NoResponse, match=r"^ConnectError: |^UnicodeError: |^InvalidURL: "):
        send_request("GET", f"http://{'a' * 70}..b/", timeout_s=SLACK_S, max_bytes=10)


def test_a_token_goes_with_each_request() -> None:
    """Each request of a client has its token and no cookie of an earlier response. The oracle is
    the text of both requests on the socket."""
    heard: list[bytes] = []
    trap = socket.create_server(("127.0.0.1", 0))

    def listen() -> None:
        with trap.accept()[0] as line:
            heard.append(b"")
            while not heard[0].endswith(b"}"):
                heard[0] += line.recv(1 << 16)
            line.sendall(b"HTTP/1.1 200 OK\r\nSet-Cookie: a=b\r\nContent-Length: 2\r\n\r\n{}")
            heard.append(line.recv(1 << 16))
            line.sendall(b"HTTP/1.1 204 Done\r\n\r\n")

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()

    async def main() -> list[BoundedResponse]:
        async with BoundedClient(f"http://127.0.0.1:{trap.getsockname()[1]}", token="a-word-of-letters") as client:
            bounds = {"timeout_s": SLACK_S, "max_bytes": 100}
            return [
                await client.request("POST", "/a", {"half": "\ud800"}, headers={"X-More": "1"}, **bounds),
                await client.request("GET", "/b", **bounds),
            ]

    first, second = asyncio.run(main())
    thread.join(SLACK_S)
    trap.close()
    assert (first.content, first.headers["set-cookie"], second.status) == (b"{}", "a=b", 204)
    assert heard[0].endswith(b'\r\n\r\n{"half":"\\ud800"}') and b"Content-Type: application/json" in heard[0] and b"X-More: 1" in heard[0]
    assert all(b"Authorization: Bearer a-word-of-letters" in each and b"Accept-Encoding: identity" in each for each in heard)
    assert b"Cookie" not in heard[1], "they would grow without a bound"


def test_a_token_that_a_server_repeats_is_in_no_error() -> None:
    """The error for a response that is not HTTP quotes the server's bytes with the token replaced
    by `***`. `text` and `repr` of a response mask the token too; `content` keeps the raw bytes."""
    with serve_hostile("echo") as url, pytest.raises(NoResponse, match=r"^RemoteProtocolError: .*\*\*\*") as error:
        send_request("GET", url, token="a-word-of-letters", timeout_s=SLACK_S, max_bytes=100)
    assert "a-word-of-letters" not in str(error.value)
    with serve_hostile("401") as url:
        answer = send_request("GET", url, token="such", timeout_s=SLACK_S, max_bytes=100)
    assert (answer.text, answer.content) == ("no *** key", b"no such key") and "'such'" not in repr(answer)


def test_there_is_no_other_client() -> None:
    """Only sandbox/bounded_http.py imports httpx. Other HTTP libraries are imported only by the
    bounded clients in clients/, the Lewis clients, the judge, the endpoint policy and MCP sessions."""
    found: dict[str, set[str]] = {}
    for path in (path for package in ("megatron_rl", "sandbox", "tools", "launch") for path in (ROOT / package).rglob("*.py")):
        for name in [] if "attack" in path.parts else re.findall(CLIENTS, path.read_text(), flags=re.MULTILINE):
            found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    clients = {f"megatron_rl/clients/{name}.py" for name in ("openai", "health_check")}
    lewis = {f"megatron_rl/tasks/lewis/{name}_client.py" for name in ("listener", "partner", "speaker")}
    assert found.pop("httpx") == {"sandbox/bounded_http.py"}
    assert found.pop("urllib.request") == {"megatron_rl/clients/proxies.py"}, "which reads the environment and asks nobody"
    mcp = {"tasks/visual_python/mcp_session.py", "tasks/visual_python/mcp_http.py"}  # the latter limits the former
    others = {"rewards/judge.py", "evaluation/endpoint_policy.py", *mcp}
    assert set.union(*found.values()) <= {*clients, *lewis, *(f"megatron_rl/{name}" for name in others)}
