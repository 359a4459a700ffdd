"""Tests clients against a server that lies: a result must lie within the limits that the server
announced, and the announced limits must be reasonable."""

import asyncio
import base64
import gzip
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from io import BytesIO
from typing import Any

import httpx
import pytest
from PIL import Image
from pydantic import TypeAdapter

from megatron_rl_sandbox import BoxLimits, CallResult, Fault, ReturnedImage, SandboxAccessDenied, SandboxError
from megatron_rl_sandbox.fusion_client import FusionSandbox
from megatron_rl_sandbox.image_codec import encode_png
from megatron_rl_sandbox.messages import decode_base64, encode_result, max_response_bytes, max_response_chars
from megatron_rl_sandbox.sandbox_client import SandboxClient
from tests.support.fake_sandbox_server import parse_results
from tests.support.hostile_server import serve_hostile

PROMISED = {"call_timeout_s": 1.0, "open_timeout_s": 1.0}


def drawn(width: int, height: int, kind: str = "PNG") -> bytes:
    buffer = BytesIO()
    Image.new("RGB", (width, height)).save(buffer, format=kind)
    return buffer.getvalue()


def wired(*pngs: bytes, size: tuple[int, int] = (28, 28), **change: Any) -> dict[str, Any]:
    pictures = tuple(ReturnedImage(png=png, width=size[0], height=size[1], source="show") for png in pngs)
    return json.loads(json.dumps(encode_result(CallResult(id=1, images=pictures)))) | change


def taken_before(data: dict[str, Any]) -> CallResult:
    """Parse a result as the client formerly did, with a check of types only."""
    images = [{**picture, "png": decode_base64(picture["png"])} for picture in data["images"]]
    return TypeAdapter(CallResult).validate_python({**data, "images": images})


GOOD = encode_png(Image.new("RGB", (28, 28)))
BROKEN = GOOD[:-20] + bytes(8) + GOOD[-12:]
ERROR = {"type": "E", "message": "m"}
LIES = {
    "a TIFF that says 28x28": wired(drawn(600, 600, "TIFF")),
    "a PNG that says another size": wired(drawn(600, 600)),
    "pixels beyond the limit": wired(encode_png(Image.new("L", (2001, 2000))), size=(2001, 2000)),
    "one side of none": wired(encode_png(Image.new("L", (5, 28))), size=(5, 28)),
    "more pictures than a call has": wired(*[GOOD] * 6),
    "bytes beyond the limit": wired(GOOD + bytes(4 << 20)),
    "pixels that do not inflate": wired(BROKEN),
    "50 MB of text": wired(text="x" * (50 << 20)),
    "a megabyte of errors": wired(stderr="x" * (1 << 20)),
    "a long message": wired(fault="code", error=ERROR | {"message": "x" * 100_000}),
    "a long traceback": wired(fault="code", error=ERROR | {"traceback": "x" * 100_000}),
    "a long limit": wired(fault="code", error=ERROR, limit="x" * 1000),
    "101 files": wired(files={str(number): 1 for number in range(101)}),
    "a file's long name": wired(files={"x" * 10_000: 1}),
    "a file of less than nothing": wired(files={"a": -1}),
    "sentences without end": wired(dropped=[{"what": "image", "reason": "r"}] * 1000),
    "time that is no number": wired(usage={"wall_s": float("nan"), "cpu_s": 0.0, "memory": 0}),
    "time without end": wired(usage={"wall_s": float("inf"), "cpu_s": 0.0, "memory": 0}),
    "a fault of nobody's": wired(fault="code"),
    "an error without a fault": wired(error=ERROR),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_no_server_of_ours_sends_is_not_believed(lie: str) -> None:
    """Finding 16: `parse_results` rejects results that no server of this project sends. The client
    formerly accepted 20 images, 50 MB of text and a TIFF of 169 megapixels."""
    assert isinstance(taken_before(LIES[lie]), CallResult), "without the wall"
    with pytest.raises(ValueError, match=r"."):
        parse_results(LIES[lie])
    assert parse_results(wired(*[GOOD] * 5)).images[4].to_pil().size == (28, 28)


def test_pictures_have_a_total_over_the_life_of_a_box() -> None:
    """A result whose images exceed the limit for the whole box (images_total) is rejected."""
    assert parse_results(wired(GOOD), limits=BoxLimits(images_total=3), calls=3)
    with pytest.raises(ValueError, match="only 3 images are returned in total"):
        parse_results(wired(GOOD), limits=BoxLimits(images_total=3), calls=4)


def test_a_picture_is_opened_as_a_png_or_not_at_all() -> None:
    with pytest.raises(OSError, match="cannot identify"):
        ReturnedImage(png=drawn(28, 28, "TIFF"), width=28, height=28, source="show").to_pil()


def test_the_largest_result_that_a_box_may_have_is_believed() -> None:
    """The client accepts the largest result that a box can produce, whatever its code writes into
    names and texts. Such a result must not look like a lie of the server."""
    limits = BoxLimits()
    data = wired(
        *[GOOD] * 5, text="," * (limits.text + 60), stderr="\0" * (limits.text + 60), fault="code",
        error={"type": "T" * 100, "message": "[" * 2000, "line": 3, "traceback": "\x01" * 8192}, limit="processes",
        files={f"{number:03}" + "{" * 4093: 1 << 40 for number in range(100)},
        dropped=[{"what": "image", "reason": "," * 6096}] * 105 + [{"what": "text", "reason": "r"}] * 2,
    )  # fmt: skip
    sent = json.dumps(data, ensure_ascii=False).encode()

    async def work() -> CallResult:
        async with lying(httpx.Response(200, content=sent)) as pool, await pool.open() as box:
            return await box.run("1")

    assert asyncio.run(work()) == parse_results(data)
    assert len(sent) < max_response_bytes(limits)
    assert sum(sent.count(mark) for mark in (b",", b"[", b"{")) < max_response_chars(limits)


def lying(answer: httpx.Response | Callable[[httpx.Request], httpx.Response], **promised: Any) -> SandboxClient:
    def server(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(200, json={"limits": PROMISED | promised})
        if request.url.path == "/boxes":
            return httpx.Response(201, json={"box": "b"})
        if request.method == "DELETE":
            return httpx.Response(204)
        return answer(request) if callable(answer) else answer

    return SandboxClient("http://sandbox", transport=httpx.MockTransport(server))


class Endless(httpx.AsyncByteStream):
    """A response body that yields `part` up to 4 GiB in total, more than any client may read."""

    def __init__(self, part: bytes) -> None:
        self.part, self.given = part, 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self.given < 1 << 32:
            await asyncio.sleep(0.0)
            self.given += len(self.part)
            yield self.part


def endless() -> Endless:
    return Endless(b" " * (1 << 20))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (httpx.Response(200, content=b"[" * 100_000), "recursion|commas"),
        (httpx.Response(200, content=b"[" * 1000), "recursion"),
        (httpx.Response(200, content=b'{"k":' + b"9" * 5000 + b"}"), "."),
        (httpx.Response(200, json=[1]), "invalid result"),
        (httpx.Response(200, json={"images": 3}), "invalid result"),
        (httpx.Response(200, json={"images": [3]}), "invalid result"),
        (httpx.Response(422, json={"detail": "your mistake"}), "your mistake"),
        (httpx.Response(429, json={}, headers={"Retry-After": "nan"}), "None"),
        (httpx.Response(500, content=b"x" * 60_000), "."),
        (lambda request: httpx.Response(200, stream=endless()), "more than"),
        (lambda request: httpx.Response(500, stream=endless()), "more than"),
        (httpx.Response(200, content=gzip.compress(bytes(1000)), headers={"Content-Encoding": "gzip"}), "compressed"),
        (httpx.Response(200, content=b'{"images": [], "text": "\\ud800"}'), "."),
    ],
)  # fmt: skip
def test_any_answer_to_a_call_is_a_result_or_the_hosts_fault(answer: Any, said: str) -> None:
    """A malformed, oversized or refusing response to a call is a host fault. No response raises in
    `run`, and none is blamed on the code."""

    async def work() -> CallResult:
        async with lying(answer) as pool, await pool.open() as box:
            result = await box.run("1")
            with pytest.raises(SandboxError):
                await box.fetch_files(["a"])
            return result

    result = asyncio.run(work())
    assert (result.fault, result.error.type) == (Fault.HOST, "SandboxError")
    assert len(result.error.message) <= 2000
    assert re.search(said, result.error.message), result.error.message


def test_an_answer_by_drops_has_a_time_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A response that arrives in drops ends at a limit on its total time, 1.5 s. The timeout of
    httpx restarts with each part of a response."""
    monkeypatch.setattr("megatron_rl_sandbox.sandbox_client.CONNECT_TIMEOUT_S", 0.5)

    async def work(url: str) -> float:
        client, began = SandboxClient(url), time.monotonic()
        with pytest.raises(SandboxError, match="no complete response within 1.5 s"):
            await client.send_request("GET", "/health", wait_s=0.5)
        await client.close()
        return time.monotonic() - began

    with serve_hostile("body by drops") as url:
        assert 1.4 < asyncio.run(work(url)) < 20


@pytest.mark.parametrize("status", ["401", "403"])
def test_a_server_that_asks_for_another_token_is_no_outage(status: str) -> None:
    """Both the start of a client and a call raise SandboxAccessDenied for a 401 or 403. Handling it
    as an outage would make the caller wait for nothing."""

    async def start(url: str) -> None:
        async with SandboxClient(url):
            pass

    async def call() -> None:
        async with lying(httpx.Response(int(status), json={"detail": "no"})) as pool, await pool.open() as box:
            await box.run("1")

    with (
        serve_hostile(status) as url,
        pytest.raises(SandboxAccessDenied, match=rf"^{url}: status {status} \(no such key\): .*--token-file$"),
    ):
        asyncio.run(start(url))
    with pytest.raises(SandboxAccessDenied, match=rf"^http://sandbox: status {status} "):
        asyncio.run(call())


@pytest.mark.parametrize(
    ("promised", "said"),
    [
        ({"call_timeout_s": float("1e300")}, "calls of"), ({"call_timeout_s": 0}, "calls of"), ({"open_timeout_s": -1.0}, "to open"),
        ({"images": 1 << 40}, "responses of"), ({"image_bytes": 1 << 40}, "responses of"), ({"text": 1 << 40}, "responses of"),
        ({"files": 1 << 40}, "responses of"), ({"image_pixels": 1 << 40}, "images of"), ({"pixels": 1 << 40}, "images of"),
        ({"images": "many"}, "not a sandbox server"), ({"call_timeout_s": None}, "not a sandbox server"),
    ],
)  # fmt: skip
def test_promises_beyond_reason_are_refused_at_the_start(promised: dict[str, Any], said: str) -> None:
    """Limits announced by a server that are excessive or invalid fail the start of the client."""

    async def work() -> None:
        async with lying(httpx.Response(200), **promised):
            pass

    with pytest.raises(SandboxError, match=said):
        asyncio.run(work())


@pytest.mark.parametrize("name", ["../x", "", "a" * 65, 3, None, "a/b", "\u00e9"])
def test_a_boxs_name_is_a_word(name: object) -> None:
    """A box name from the server that is not a short word, such as a path, is rejected."""

    def server(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"limits": PROMISED} if request.url.path == "/health" else {"box": name})

    async def work() -> None:
        async with SandboxClient("http://sandbox", transport=httpx.MockTransport(server)) as pool:
            await pool.open()

    with pytest.raises(SandboxError, match="no box id"):
        asyncio.run(work())


@pytest.mark.parametrize(
    "answer", [{"b": ""}, {"a": "%"}, {"a": 3}, {"a": "AAAA" * 1000}, [], "a", None, {"a": "AAAA" * 300, "c": "AAAA" * 300}]
)
def test_files_that_nobody_asked_for_or_that_are_too_large_are_refused(answer: object) -> None:
    """Fetched files that were not requested or that are too large raise SandboxError. The client
    formerly accepted them or raised AttributeError for a list."""

    async def work(answer: object) -> dict[str, bytes]:
        sizes = {"file": 2000, "disk": 1000, "input_bytes": 700}
        async with lying(httpx.Response(200, json=answer), **sizes) as pool, await pool.open() as box:
            return await box.fetch_files(["a", "c"])

    with pytest.raises(SandboxError):
        asyncio.run(work(answer))
    assert asyncio.run(work({"a": "AAAA"})) == {"a": bytes(3)}


def test_what_the_server_would_refuse_is_not_sent() -> None:
    """Code and inputs beyond the limits get the same errors as from a pool in this process, and no
    request is sent."""

    def nobody(request: httpx.Request) -> httpx.Response:
        raise AssertionError(request.url)

    async def work() -> CallResult:
        async with lying(nobody, code=100, input_bytes=1000) as pool:
            with pytest.raises(ValueError, match="limits are 1000 inputs and 1000 bytes"):
                await pool.open(files={"a": bytes(1001)})
            with pytest.raises(ValueError, match="a name: "):
                await pool.open(files={"\ud800": b""})
            async with await pool.open() as box:
                return await box.run("x" * 101)

    result = asyncio.run(work())
    assert (result.fault, result.limit, result.error.type) == (Fault.CODE, "code", "CodeTooLong")


@pytest.mark.parametrize("written", [b"[" * 100_000, b"3", b'["a", "b", "c"]', b'["\\ud800", "m", 1]', b"{}"])
def test_what_code_writes_on_a_fusion_server_is_never_an_exception_of_ours(written: bytes) -> None:
    """The code shares a folder with the error file of the client's wrapper. Whatever the code
    writes into that file is the code's fault; deeply nested JSON formerly raised RecursionError in
    the client."""
    files = {"_error.json": base64.b64encode(written).decode(), "_image_0.png": "%%%"}
    run = {"status": "Finished", "return_code": 1, "stdout": "", "stderr": ""}
    answer = httpx.Response(200, json={"status": "Failed", "run_result": run, "files": files})

    async def work(answer: httpx.Response) -> CallResult:
        transport = httpx.MockTransport(lambda request: answer)
        async with FusionSandbox("http://fusion", transport=transport) as pool, await pool.open() as box:
            return await box.run("1")

    result = asyncio.run(work(answer))
    assert (result.fault, result.error.type) == (Fault.CODE, "SystemExit")
    assert asyncio.run(work(httpx.Response(200, stream=endless()))).fault is Fault.HOST


def test_a_client_says_its_token() -> None:
    """A client sends its token with every request, and accepts no compressed response."""
    said = []

    def server(request: httpx.Request) -> httpx.Response:
        said.append((request.headers.get("Authorization"), request.headers["Accept-Encoding"]))
        return httpx.Response(200, json={"limits": PROMISED})

    async def work(**token: str) -> None:
        async with SandboxClient("http://sandbox", transport=httpx.MockTransport(server), **token):
            pass

    asyncio.run(work(token="w" * 20))
    asyncio.run(work())
    assert said == [("Bearer " + "w" * 20, "identity"), (None, "identity")]
