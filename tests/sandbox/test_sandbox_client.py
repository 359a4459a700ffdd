"""Tests clients against servers with invalid responses, and the SandboxFusion client against a
stand-in that behaves as documented."""

import asyncio
import base64
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from megatron_rl.services.supervised_process import find_free_port
from megatron_rl_sandbox import BoxLimits, CallError, CallResult, CallUsage, DroppedOutput, Fault, PoolFull, ReturnedImage, SandboxError
from megatron_rl_sandbox import image_codec as pictures
from megatron_rl_sandbox.bounded_http import BoundedClient, BoundedResponse, NoResponse
from megatron_rl_sandbox.fusion_client import FusionSandbox
from megatron_rl_sandbox.image_codec import encode_png
from megatron_rl_sandbox.messages import encode_result
from megatron_rl_sandbox.sandbox_client import CONNECT_TIMEOUT_S, SandboxClient
from tests.support.fake_sandbox_server import parse_results

HEALTH = {"limits": {"call_timeout_s": 1.0, "open_timeout_s": 1.0}}
PIXELS = encode_png(Image.new("RGB", (40, 30), (9, 8, 7)))


def client(answer: Callable[[httpx.Request], httpx.Response]) -> SandboxClient:
    return SandboxClient("http://sandbox", transport=httpx.MockTransport(answer))


def test_a_result_survives_the_wire() -> None:
    """A result equals itself after encoding, JSON and parsing."""
    result = CallResult(
        id=3,
        fault=Fault.CODE,
        text="é\n",
        images=(ReturnedImage(png=PIXELS, width=40, height=30, source="show"),),
        error=CallError(type="E", message="m", line=2, traceback="t"),
        limit="time",
        files={"a": 1},
        dropped=(DroppedOutput(what="image", reason="r"),),
        usage=CallUsage(wall_s=0.5, cpu_s=0.25, memory=7),
        state_lost=True,
    )
    assert parse_results(json.loads(json.dumps(encode_result(result)))) == result


@pytest.mark.parametrize("change", [{"fault": "nobody"}, {"images": [{"png": "%"}]}, {"id": "x y"}, {"usage": 3}])
def test_a_result_that_is_none_is_refused(change: dict[str, Any]) -> None:
    """A result with a field of invalid value raises ValueError."""
    data = encode_result(CallResult(id=1))
    with pytest.raises(ValueError, match=r"."):
        parse_results(data | change)


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(500, text="oops"),
        httpx.Response(503, json={"detail": "closing"}),
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json={"id": 1}),
        httpx.Response(200, json=[]),
    ],
)
def test_a_broken_server_is_the_hosts_fault(answer: httpx.Response) -> None:
    def server(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(200, json=HEALTH)
        return httpx.Response(201, json={"box": "b"}) if request.url.path == "/boxes" else answer

    async def work() -> CallResult:
        async with client(server) as pool, await pool.open() as box:
            return await box.run("1")

    result = asyncio.run(work())
    assert result.fault is Fault.HOST
    assert result.error is not None and "sandbox" in result.error.message


def test_a_connection_that_breaks_in_a_call_is_not_tried_again() -> None:
    """A connection that breaks during a call is a host fault. The call is not repeated, and the box
    is closed."""
    calls = []

    def server(request: httpx.Request) -> httpx.Response:
        calls.append(request.url.path)
        if request.url.path.endswith("/calls"):
            raise httpx.ReadError("reset", request=request)
        return httpx.Response(200, json=HEALTH | {"box": "b"})

    async def work() -> CallResult:
        async with client(server) as pool, await pool.open() as box:
            return await box.run("1")

    assert asyncio.run(work()).fault is Fault.HOST
    assert calls == ["/health", "/boxes", "/boxes/b/calls", "/boxes/b"]


def waited(monkeypatch: pytest.MonkeyPatch, *, answers_after: float) -> tuple[dict[str, float], list[Fault | None]]:
    """Return the seconds that a client waits, keyed by path, and the faults that it reports for a
    server that takes `answers_after` seconds."""
    monkeypatch.setattr("megatron_rl_sandbox.sandbox_client.CLIENT_GRACE_S", 0.0)
    told = encode_result(CallResult(id=1, fault=Fault.CODE, error=CallError(type="TimeLimit", message="1 s")))
    allowed = {}

    send = BoundedClient.request

    async def request(http: BoundedClient, verb: str, path: str, body: object = None, **bounds: Any) -> BoundedResponse:
        allowed[path] = (bounds["timeout_s"] - CONNECT_TIMEOUT_S) / 2  # half for the request, half for the response
        if path != "/boxes" and verb == "POST" and allowed[path] < answers_after:
            raise NoResponse("late")
        return await send(http, verb, path, body, **bounds)

    monkeypatch.setattr(BoundedClient, "request", request)

    def server(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        return httpx.Response(200, json={"/boxes/b/calls": told, "/boxes/b/files": {}}.get(path, HEALTH | {"box": "b"}))

    async def work() -> list[Fault | None]:
        async with client(server) as pool, await pool.open(wait_s=7.0) as box:
            called = await box.run("while True: pass")
            try:
                await box.fetch_files(["a"])
            except SandboxError:
                return [called.fault, None]
            return [called.fault, Fault.NONE]

    return allowed, asyncio.run(work())


def test_a_client_waits_as_long_as_a_server_may_take_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client waits 60 s for a new zygote and four times each limit (sandbox/clock.py). The limits
    are 1 s to open a box, which a call needs too if its box was killed, and 1 s for a call or a
    fetch."""
    allowed, faults = waited(monkeypatch, answers_after=67.9)
    assert faults == [Fault.CODE, Fault.NONE]
    assert allowed["/boxes"] == pytest.approx(7 + 60 + 4, abs=0.5)  # plus the 7 s that it asked to wait for a slot
    assert (allowed["/boxes/b/calls"], allowed["/boxes/b/files"]) == (60 + 4 + 4, 60 + 4 + 4)
    assert waited(monkeypatch, answers_after=68.1)[1] == [Fault.HOST, None]


def test_an_open_waits_as_the_server_says_and_no_longer_than_asked() -> None:
    """`open` retries after the Retry-After of a full pool, for at most `wait_s` in total."""
    asked = []

    def server(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(200, json=HEALTH)
        asked.append(json.loads(request.content)["wait_s"])
        full = len(asked) < 3
        refusal = httpx.Response(429, json={"detail": "full"}, headers={"Retry-After": "0.2"})
        return refusal if full else httpx.Response(201, json={"box": "b"})

    async def work(wait_s: float | None) -> None:
        async with client(server) as pool:
            await pool.open(wait_s=wait_s)

    asyncio.run(work(None))
    assert asked == [60, 60, 60]  # an unlimited wait is sent in pieces
    asked.clear()
    asyncio.run(work(5.0))
    assert len(asked) == 3 and 4.4 < asked[2] < 4.7 < asked[1] < asked[0] <= 5.0
    asked.clear()
    with pytest.raises(PoolFull, match="full"):
        asyncio.run(work(0.3))
    assert len(asked) == 2


def fusion_stand_in(request: httpx.Request) -> httpx.Response:
    """Answer POST /run_code as documented: write the files to a fresh directory, run the code as a
    script, and return those of the requested files that exist."""
    assert (request.method, request.url.path) == ("POST", "/run_code")
    body = json.loads(request.content)
    assert body["language"] == "python"
    with tempfile.TemporaryDirectory() as folder:
        for name, content in body["files"].items():
            Path(folder, name).write_bytes(base64.b64decode(content))
        Path(folder, "tmp.py").write_text(body["code"])
        run: dict[str, Any] = {"status": "Finished", "execution_time": 0.1}
        try:
            options = {"input": body["stdin"] or "", "timeout": body["run_timeout"], "capture_output": True, "text": True}
            done = subprocess.run([sys.executable, "tmp.py"], cwd=folder, check=False, **options)
            run |= {"return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
        except subprocess.TimeoutExpired as late:
            run |= {"status": "TimeLimitExceeded", "stdout": (late.stdout or b"").decode(), "stderr": ""}
        files = {
            name: base64.b64encode(Path(folder, name).read_bytes()).decode() for name in body["fetch_files"] if Path(folder, name).is_file()
        }
    status = "Success" if run.get("return_code") == 0 else "Failed"
    return httpx.Response(200, json={"status": status, "message": "", "run_result": run, "files": files})


def run_on_fusion(*codes: str, limits: BoxLimits | None = None, **inputs: Any) -> list[CallResult]:
    async def work() -> list[CallResult]:
        transport = httpx.MockTransport(fusion_stand_in)
        async with FusionSandbox("http://fusion", limits=limits, transport=transport) as pool, await pool.open(**inputs) as box:
            return [await box.run(code) for code in codes]

    return asyncio.run(work())


def test_a_fusion_box_has_its_inputs_every_time_and_says_that_it_forgets() -> None:
    """A SandboxFusion box has its inputs in every call. From the second call on, results have
    `state_lost` set."""
    codes = ("x += 1\nprint(x, image_0.getpixel((0, 0)), open('a.txt').read())",) * 2
    first, second = run_on_fusion(*codes, images={"image_0": PIXELS}, files={"a.txt": b"A"}, preload="x = 1")
    assert first == CallResult(id=1, text="2 (9, 8, 7) A\n", usage=CallUsage(wall_s=0.1))
    assert second == replace(first, id=2, state_lost=True)


def test_a_fusion_box_returns_images_and_drops_what_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SandboxFusion box returns images up to its limits and lists the rest as dropped. Each image
    is read in a thread of its own, so that it does not block the event loop."""
    readers, size = [threading.get_ident()], pictures.read_png_size
    monkeypatch.setattr(pictures, "read_png_size", lambda png: readers.append(threading.get_ident()) or size(png))
    code = "import matplotlib.pyplot as plt\nfor n in range(3):\n    image_0.rotate(0).show()\nplt.figure(figsize=(1, 1)); plt.plot([1])"
    (result,) = run_on_fusion(code, images={"image_0": PIXELS}, limits=BoxLimits(images=2))
    assert [(picture.width, picture.height) for picture in result.images] == [(40, 30)] * 2
    assert [drop.reason for drop in result.dropped] == ["only 2 images are returned per call"]
    assert result.images[0].to_pil().getpixel((1, 1)) == (9, 8, 7)
    (result,) = run_on_fusion(code, images={"image_0": PIXELS})
    assert [(picture.width, picture.height) for picture in result.images] == [*[(40, 30)] * 3, (100, 100)]
    (thin,) = run_on_fusion("open('_image_0.png', 'wb').write(b'no png')\nprint('x' * 30)", limits=BoxLimits(text=20))
    assert (thin.images, thin.text) == ((), "xxxxxxxxxx\n[...]\nxxxxxxxxx\n")
    assert [drop.what for drop in thin.dropped] == ["image", "text"]
    assert readers.count(readers[0]) == 1 < len(readers)


@pytest.mark.parametrize(
    ("code", "error", "line"),
    [("y = 1\nraise KeyError('k')", "KeyError", 2), ("x = (", "SyntaxError", 1), ("def f():\n    1 / 0\n\nf()", "ZeroDivisionError", 2)],
)
def test_a_fusion_box_tells_type_and_line(code: str, error: str, line: int) -> None:
    """An error in a SandboxFusion box has its type and line."""
    (result,) = run_on_fusion(code)
    assert result.error is not None
    assert (result.fault, result.error.type, result.error.line, result.limit) == (Fault.CODE, error, line, None)


def test_a_fusion_box_tells_a_time_out_and_an_end() -> None:
    """A SandboxFusion box reports a timeout as the limit "time" and an exit of the program as
    SystemExit."""
    (slow,) = run_on_fusion("print(1, flush=True)\nwhile True: pass", limits=BoxLimits(call_timeout_s=2.0))
    (ended,) = run_on_fusion("import os; os._exit(7)")
    assert (slow.fault, slow.limit, slow.text) == (Fault.CODE, "time", "1\n")
    assert ended.error == CallError(type="SystemExit", message="the program ended with status 7")


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(500),
        httpx.Response(200, text="{"),
        httpx.Response(200, json={"status": "SandboxError", "message": "no disk"}),
        httpx.Response(200, json={"status": "Success", "message": ""}),
    ],
)
def test_a_fusion_server_in_trouble_is_the_hosts_fault(answer: httpx.Response) -> None:
    async def work() -> CallResult:
        transport = httpx.MockTransport(lambda request: answer)
        async with FusionSandbox("http://fusion", transport=transport) as pool, await pool.open() as box:
            return await box.run("1")

    result = asyncio.run(work())
    assert result.fault is Fault.HOST
    assert result.error is not None and result.error.message.startswith("SandboxFusion: ")


@pytest.mark.parametrize(
    ("answer", "said"), [(httpx.Response(502), "502"), (httpx.Response(200, json={"limits": {}}), "not a sandbox server")]
)
def test_health_that_is_none_is_the_hosts_fault(answer: httpx.Response, said: str) -> None:
    """An invalid health response fails the start of a client with SandboxError."""

    async def work() -> None:
        async with client(lambda request: answer):
            pass

    with pytest.raises(SandboxError, match=said):
        asyncio.run(work())


@pytest.mark.parametrize("status", [404, 409, 413, 422, 429, 503])
def test_whatever_a_server_refuses_it_ends_no_run(status: int) -> None:
    """If the server refuses a request, the start of a client raises only SandboxError, for which
    its callers name a remedy. Closing a box raises nothing."""

    def refusing(verb: str) -> Callable[[httpx.Request], httpx.Response]:
        def server(request: httpx.Request) -> httpx.Response:
            good = httpx.Response(201, json={"box": "b"}) if request.method == "POST" else httpx.Response(200, json=HEALTH)
            return httpx.Response(status, json={"detail": "refused here"}) if request.method == verb else good

        return server

    async def start() -> None:
        async with client(refusing("GET")):
            pass

    async def close() -> bool:
        async with client(refusing("DELETE")) as pool, await pool.open() as box:
            pass
        return box.is_closed

    with pytest.raises(SandboxError, match="refused here"):
        asyncio.run(start())
    assert asyncio.run(close())


def test_a_server_that_is_not_there_is_the_hosts_fault() -> None:
    port = find_free_port("127.0.0.1")

    async def talking() -> None:
        async with SandboxClient(f"http://127.0.0.1:{port}"):
            pass

    with pytest.raises(SandboxError, match=f"127.0.0.1:{port}"):
        asyncio.run(talking())
