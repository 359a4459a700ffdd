"""Tests that no input gets a 500: Hypothesis covers every route of the OpenAPI page, and a seeded
fuzzer sends mutated bytes over real sockets."""

import asyncio
import json
import random
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatron_rl_sandbox import BoxLimits
from megatron_rl_sandbox.connections import ConnectionRegistry
from megatron_rl_sandbox.server import create_app
from tests.support.fake_sandbox_server import FakePool, build_request, read_answer, serve_sandbox

POOL = FakePool(BoxLimits(call_timeout_s=0.05, input_bytes=1 << 16), size=200)
APP = create_app(POOL)
ROUTES = [(verb.upper(), path) for path, verbs in APP.openapi()["paths"].items() for verb in verbs]
TEXT = st.text(max_size=20) | st.sampled_from(["", "image_0", "../a", "a/b", "\0", "\ud800", "python", "iVBORw0KGgo=", "raise x", "1000"])
NUMBER = st.floats() | st.integers() | st.sampled_from([0.05, 1e308, -1, 1 << 70])
ANY = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4)
)
KEYS = (
    "images",
    "files",
    "preload",
    "wait_s",
    "call",
    "code",
    "timeout_s",
    "names",
    "language",
    "run_timeout",
    "stdin",
    "fetch_files",
    "args",
)
BODY = st.fixed_dictionaries({}, optional={key: TEXT | NUMBER | st.dictionaries(TEXT, TEXT) | st.lists(TEXT) | ANY for key in KEYS})
RIGHT = st.sampled_from(
    [{"call": "a", "code": "1"}, {"names": ["1000", "x"]}, {"code": "1", "language": "python"}, {"images": {"a": "iVBORw0KGgo="}}, {}]
)
RAW = st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass"))


def test_every_route_is_on_the_page() -> None:
    """The OpenAPI page lists every route and the fields of the body of /boxes."""
    assert {path for _, path in ROUTES} == {
        "/boxes",
        "/boxes/{name}",
        "/boxes/{name}/calls",
        "/boxes/{name}/files",
        "/run_code",
        "/health",
        "/metrics",
    }
    posted = APP.openapi()["paths"]["/boxes"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(posted["properties"]) == {"images", "files", "preload", "wait_s"}


def answered(app: FastAPI, verb: str, path: str, content: bytes, headers: dict[str, str]) -> httpx.Response:
    """Send a request about a new box to the application. Exceptions of the application
    propagate."""

    async def work() -> httpx.Response:
        async with httpx.AsyncClient(base_url="http://127.0.0.1:8080", transport=httpx.ASGITransport(app)) as http:
            name = (await http.post("/boxes", json={})).json()["box"]
            return await http.request(verb, path.replace("{name}", name), content=content, headers=headers)

    return asyncio.run(work())


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    route=st.sampled_from(ROUTES),
    body=(RIGHT | BODY | ANY).map(lambda value: json.dumps(value).encode()) | RAW,
    kind=st.sampled_from(["application/json", "application/json; charset=utf-16", "text/plain", "multipart/form-data; boundary=a", ""]),
)
def test_no_input_is_a_mistake_of_the_server(route: tuple[str, str], body: bytes, kind: str) -> None:
    """A generated body on any route gets an expected status below 500 and a short response."""
    answer = answered(APP, *route, body, {"Content-Type": kind})
    allowed = (200, 201, 204, 404, 405, 409, 413, 422, 429) if kind.startswith("application/json") else (200, 204, 404, 405, 415)
    assert answer.status_code in allowed, (answer.status_code, answer.text[:200])
    assert len(answer.content) < 10_000
    assert all("where" in each for each in answer.json()["detail"]) if answer.status_code == 422 and answer.text[10] == "[" else True


def test_the_fuzzer_finds_what_was_there() -> None:
    """The inputs above find finding 22 again in a server with the former bug, which raises
    UnicodeEncodeError."""
    broken = FastAPI()

    async def opened(request: Request) -> dict[str, Any]:
        body = json.loads(await request.body() or b"{}")
        body = body if isinstance(body, dict) else {}
        images = body.get("images")
        return {"box": "x", "names": [len(name.encode()) for name in images] if isinstance(images, dict) else []}

    broken.post("/boxes")(opened)

    quick = {"phases": [Phase.generate], "suppress_health_check": list(HealthCheck)}  # the first failure, not the smallest

    @settings(max_examples=4000, deadline=None, derandomize=True, database=None, **quick)
    @given(body=(RIGHT | BODY).map(lambda value: json.dumps(value).encode()))
    def fuzz(body: bytes) -> None:
        answered(broken, "POST", "/boxes", body, {})

    with pytest.raises(UnicodeEncodeError):
        fuzz()


LINES = (
    build_request("/health", method="GET"), build_request("/boxes", {}), build_request("/boxes", {"preload": "x"},
    headers="Expect: 100-continue\r\n"),
    build_request("/run_code", {"code": "1", "language": "python"}), build_request("/boxes/x/calls", {"call": "a", "code": "1"}),
    build_request("/boxes/x", method="DELETE"), build_request("/health/", method="GET", headers="Host: [\r\n"),
    build_request("//x:y@[/%00%ff", method="OPTIONS"),
    build_request("*", method="OPTIONS"), build_request("http://[::1/boxes", {}), build_request("/boxes", {},
    headers="Transfer-Encoding: chunked\r\n"),
    b"POST /boxes HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: y\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    build_request("/boxes", {}, headers="Content-Encoding: gzip\r\nContent-Type: a\r\n"),
    build_request("/health", method="GET", headers="Upgrade: h2c\r\nConnection: upgrade\r\n"),
)  # fmt: skip
PIECES = (
    b"\r\n",
    b"\0",
    b"%",
    b"[",
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: x\r\n",
    b"\xff\xfe",
    b" ",
    b"HTTP/1.0",
    b"9" * 30,
    b"a" * 20_000,
)


def mutated(line: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.randrange(4)):
        start = chance.randrange(len(line) + 1)
        end = min(len(line), start + chance.randrange(8))
        line = line[:start] + chance.choice((chance.choice(PIECES), chance.randbytes(2), b"")) + line[end:]
    return line if chance.random() < 0.8 else line + chance.choice(LINES)


def statuses(answer: bytes) -> list[int]:
    return [int(part[2:5]) for part in answer.split(b"HTTP/1.")[1:]]


def test_bytes_of_any_kind_get_an_answer_or_none() -> None:
    """Mutated requests on real sockets get no status of 500 or above. The server then responds and
    has logged nothing."""
    chance, seen = random.Random(0), set()
    with serve_sandbox(connections=ConnectionRegistry(header_timeout_s=0.3, body_timeout_s=0.3), pool=FakePool(size=200)) as server:
        for _ in range(5):
            with ExitStack() as opened:
                lines = [opened.enter_context(server.connect()) for _ in range(180)]
                for line in lines:
                    with suppress(OSError):  # the server has already closed this connection
                        line.sendall(mutated(chance.choice(LINES), chance))
                for line in lines:
                    seen |= set(statuses(read_answer(line)))
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.log == []
    assert {200, 201, 400, 404, 422} <= seen
    assert not [status for status in seen if status >= 500], seen
