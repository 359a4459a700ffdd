"""Tests the sandbox server in its own process over a real socket, with this project's client, with
bare HTTP and with a client that disconnects."""

import asyncio
import base64
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from io import BytesIO
from typing import Any

import httpx
import psutil
import pytest
from PIL import Image

from megatron_rl_sandbox import BoxClosed, Fault, Isolation, PoolFull, SandboxError
from megatron_rl_sandbox.fusion_client import FusionSandbox
from megatron_rl_sandbox.layers import choose_layers, detect_layers
from megatron_rl_sandbox.sandbox_client import SandboxClient
from tests.conftest import ROOT

SIZE, IDLE_S = 2, 4.0


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, psutil.Process, int]]:
    """Yield the server's address, its process, and its number of processes and descriptors before
    the first request."""
    try:
        choose_layers(detect_layers())
        isolation = Isolation.AUTO
    except SandboxError as reason:
        print(f"this host offers no room: served without isolation ({reason})")
        isolation = Isolation.NONE
    options = {"port": 0, "size": SIZE, "wait": 0.3, "idle": IDLE_S, "isolation": isolation.value, "limit": "call_timeout_s=30"}
    command = [sys.executable, "-m", "megatron_rl_sandbox", "serve", *[f"--{name}={value}" for name, value in options.items()]]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address, watched = process.stdout.readline().strip(), psutil.Process(process.pid)
            yield address, watched, _settled(watched)
        finally:
            process.terminate()
            assert process.wait(20) == 0


@pytest.fixture
def url(server: tuple[str, psutil.Process, int]) -> Iterator[str]:
    """Yield the server's address. Afterwards no box may be open, and the server may hold no more
    processes and descriptors than before all requests."""
    address, process, before = server
    yield address
    assert _until(lambda: _held(process) <= before and httpx.get(f"{address}/health").json()["open"] == 0, IDLE_S + 4), (
        before,
        _held(process),
    )


def _held(process: psutil.Process) -> int:
    sockets = [link for link in process.net_connections("tcp") if link.status == psutil.CONN_ESTABLISHED]
    return len(process.children(recursive=True)) + process.num_fds() - len(sockets)


def _settled(process: psutil.Process) -> int:
    """Return `_held` once it has been constant for a second. Spare processes for boxes are still
    being started when the server prints its address."""
    readings = [_held(process)]
    while len(readings) < 5 or len(set(readings[-5:])) > 1:
        assert len(readings) < 100, readings
        time.sleep(0.2)
        readings.append(_held(process))
    return readings[-1]


def _until(true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def talk(url: str, talking: Callable[[SandboxClient], Coroutine[Any, Any, None]]) -> None:
    async def work() -> None:
        async with SandboxClient(url) as pool:
            await talking(pool)

    asyncio.run(work())


def opened(url: str, **body: Any) -> str:
    answer = httpx.post(f"{url}/boxes", json=body)
    assert answer.status_code == 201, answer.text
    return f"{url}/boxes/{answer.json()['box']}"


def test_a_box_over_http_is_a_box(url: str) -> None:
    """A box behind HTTP has the results, faults, limits and lost state of a local box. The values
    are worked out by hand."""
    picture = Image.new("RGB", (64, 48), (1, 2, 3))

    async def talking(pool: SandboxClient) -> None:
        inputs = {"images": {"image_0": picture, "b.png": _png(picture)}, "files": {"in/a.bin": b"\0\xff"}, "preload": "x = 40"}
        async with await pool.open(**inputs) as box:
            first = await box.run("x += 2\nprint(x, image_0.size, b.getpixel((0, 0)), open('in/a.bin', 'rb').read())")
            assert (first.text, first.fault, first.state_lost) == ("42 (64, 48) (1, 2, 3) b'\\x00\\xff'\n", Fault.NONE, False)
            shown = await box.run("image_0.crop((0, 0, 32, 30)).show()\nopen('out.bin', 'wb').write(bytes([7, 0, 255]))")
            assert [(image.width, image.height, image.to_pil().getpixel((5, 5))) for image in shown.images] == [(32, 30, (1, 2, 3))]
            assert shown.files == {"out.bin": 3}
            assert await box.fetch_files(["out.bin", "none"]) == {"out.bin": b"\x07\x00\xff"}
            wrong = await box.run("\nimport os\nos.nothing")
            assert wrong.error is not None
            assert (wrong.fault, wrong.error.type, wrong.error.line, wrong.limit) == (Fault.CODE, "AttributeError", 3, None)
            late = await box.run("print('so far', flush=True)\nwhile True: pass", timeout_s=0.4)
            assert (late.fault, late.limit, late.text) == (Fault.CODE, "time", "so far\n")
            after = await box.run("print(x)")
            assert (after.state_lost, after.text) == (True, "40\n")
        with pytest.raises(BoxClosed):
            await box.run("1")
        await box.close()

    talk(url, talking)


def test_a_full_pool_pushes_back_and_nobody_loses_anything(url: str) -> None:
    """A full pool responds with 429. A waiting client gets the next free slot, and open boxes keep
    their state."""

    async def talking(pool: SandboxClient) -> None:
        boxes = [await pool.open() for _ in range(SIZE)]
        for number, box in enumerate(boxes):
            await box.run(f"x = {number}")
        bare = httpx.post(f"{url}/boxes", json={})
        assert (bare.status_code, bare.headers["Retry-After"]) == (429, "1")
        assert "all 2 boxes" in bare.json()["detail"]
        with pytest.raises(PoolFull):
            await pool.open(wait_s=0.5)
        waiting = asyncio.create_task(pool.open())  # retries until a slot is free
        await asyncio.sleep(0.5)
        await boxes[0].close()
        third = await asyncio.wait_for(waiting, 10)
        assert (await third.run("print('x' in globals())")).text == "False\n"
        assert (await boxes[1].run("print(x)")).text == "1\n"
        await asyncio.gather(third.close(), boxes[1].close())

    talk(url, talking)


def test_a_call_runs_once(url: str) -> None:
    """A repeated call id gets a 409, and its code does not run again."""
    box = opened(url)
    first = httpx.post(f"{box}/calls", json={"call": "a", "code": "n = 1; print(n)"})
    again = httpx.post(f"{box}/calls", json={"call": "a", "code": "n += 1; print(n)"})
    other = httpx.post(f"{box}/calls", json={"call": "b", "code": "n += 1; print(n)"})
    assert (first.json()["text"], again.status_code, other.json()["text"]) == ("1\n", 409, "2\n")
    assert "'a'" in again.json()["detail"]
    assert httpx.delete(box).status_code == 204
    assert httpx.delete(box).status_code == 404


def test_an_unknown_box_and_what_is_no_request(url: str) -> None:
    for answer in (
        httpx.post(f"{url}/boxes/{'0' * 32}/calls", json={"call": "a", "code": "1"}),
        httpx.post(f"{url}/boxes/x/files", json={"names": []}),
        httpx.delete(f"{url}/boxes/x"),
    ):
        assert answer.status_code == 404
        assert "no open box has the id" in answer.json()["detail"]
    for body in ({"image": {}}, {"images": {"a": "%%%"}}, {"files": {"../a": ""}}, {"preload": "1 / 0"}, {"preload": "x" * 200_000 + "("}):
        answer = httpx.post(f"{url}/boxes", json=body)
        assert answer.status_code == 422, body
        assert len(answer.content) < 5000, "what was sent is not sent back"
    assert httpx.post(f"{url}/boxes", content=b"{", headers={"Content-Type": "application/json"}).status_code == 422


def test_bad_code_is_the_codes_fault(url: str) -> None:
    box = opened(url)
    for number, (code, said) in enumerate((("x = 1\0", "null byte"), ("#" * (10 << 20), "10485760"), ("(", "never closed"))):
        result = httpx.post(f"{box}/calls", json={"call": str(number), "code": code}, timeout=30).json()
        assert result["fault"] == "code", code[:10]
        assert said in result["error"]["message"], result["error"]
    half = b'{"call": "s", "code": "x = \\"\\ud800\\""}'
    assert httpx.post(f"{box}/calls", content=half, headers={"Content-Type": "application/json"}).status_code == 422
    assert httpx.post(f"{box}/calls", json={"call": "ok", "code": "print(6)"}).json()["text"] == "6\n"
    httpx.delete(box)


def test_bad_images_are_refused_and_leave_nothing(url: str) -> None:
    bomb = _png(Image.new("1", (30_000, 30_000)))
    whole = _png(Image.effect_noise((200, 200), 60))
    for name, image in (("bomb", bomb), ("cut", whole[: len(whole) // 2]), ("text", b"not an image"), ("nothing", b"")):
        answer = httpx.post(f"{url}/boxes", json={"images": {"image_0": base64.b64encode(image).decode()}}, timeout=30)
        assert (answer.status_code, "image_0" in answer.json()["detail"]) == (422, True), (name, answer.text)


def test_a_request_beyond_all_measure_is_not_read(url: str) -> None:
    """A request that announces 100 GB is refused with 413 before its body arrives."""
    host, port = re.fullmatch(r"http://(.*):(\d+)", url).groups()  # type: ignore[union-attr]
    with socket.create_connection((host, int(port))) as line:
        line.sendall(b"POST /boxes HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n{")
        assert line.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_goes_away_in_the_middle_of_a_call_loses_its_box_only(url: str) -> None:
    kept, left = opened(url), opened(url)
    httpx.post(f"{kept}/calls", json={"call": "a", "code": "x = 7"})
    host, port = re.fullmatch(r"http://(.*):(\d+)", url).groups()  # type: ignore[union-attr]
    body = json.dumps({"call": "a", "code": "import time; time.sleep(60)", "timeout_s": 60}).encode()
    path = left.removeprefix(url)
    with socket.create_connection((host, int(port))) as line:
        head = f"POST {path}/calls HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        line.sendall(head.encode() + body)
        assert _until(lambda: httpx.get(f"{url}/health").json()["open"] == 2, 5)
        time.sleep(0.3)
    assert _until(lambda: httpx.get(f"{url}/health").json()["open"] == 1, 3), "the deserted box is closed"
    assert httpx.post(f"{left}/calls", json={"call": "b", "code": "1"}).status_code == 404
    assert httpx.post(f"{kept}/calls", json={"call": "b", "code": "print(x)"}).json()["text"] == "7\n"
    assert "sandbox_calls_abandoned_total 1.0" in httpx.get(f"{url}/metrics").text
    httpx.delete(kept)


def test_a_box_that_nobody_calls_is_closed(url: str) -> None:
    box = opened(url)
    assert _until(lambda: httpx.get(f"{url}/health").json()["open"] == 0, IDLE_S + 3)
    late = httpx.post(f"{box}/calls", json={"call": "a", "code": "1"})
    assert late.status_code == 404
    assert f"idle for {IDLE_S:g} s" in late.json()["detail"]


def test_health_and_metrics_count(url: str) -> None:
    def value(name: str) -> float:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    health = httpx.get(f"{url}/health").json()
    assert (health["status"], health["size"], health["open"], health["limits"]["call_timeout_s"]) == ("ok", SIZE, 0, 30.0)
    assert value("sandbox_boxes ") == SIZE
    names = ('sandbox_calls_total{fault="none"', 'sandbox_calls_total{fault="code",limit="time"', "sandbox_images_total")
    before = {name: value(name) for name in names}
    box = opened(url)
    codes = ("from PIL import Image\nImage.new('L', (40, 40)).show()\nImage.new('L', (50, 40)).show()", "while True: pass")
    for number, code in enumerate(codes):
        httpx.post(f"{box}/calls", json={"call": str(number), "code": code, "timeout_s": 0.5})
    assert value("sandbox_boxes_open ") == 1
    assert [value(name) - count for name, count in before.items()] == [1, 1, 2]
    httpx.delete(box)


def test_sandbox_fusions_request(url: str) -> None:
    request = {
        "code": "import sys\nprint('hello', input(), open('in.txt').read())\nopen('out.txt', 'w').write('42')\nprint('!', file=sys.stderr)",
        "language": "python",
        "stdin": "world\n",
        "files": {"in.txt": base64.b64encode(b"there").decode(), "gone.txt": None},
        "fetch_files": ["out.txt", "missing.txt"],
        "memory_limit_MB": 256,
        "key_of_a_later_version": 1,
    }
    answer = httpx.post(f"{url}/run_code", json=request).json()
    run = answer.pop("run_result")
    assert run.pop("execution_time") > 0
    assert run == {"status": "Finished", "return_code": 0, "stdout": "hello world there\n", "stderr": "!\n"}
    assert answer == {
        "status": "Success",
        "message": "",
        "compile_result": None,
        "executor_pod_name": None,
        "files": {"out.txt": base64.b64encode(b"42").decode()},
    }


@pytest.mark.parametrize(
    ("code", "status", "run_status", "return_code", "said"),
    [
        ("1 / 0", "Failed", "Finished", 1, "ZeroDivisionError: division by zero"),
        ("raise SystemExit", "Success", "Finished", 0, ""),
        ("import sys; sys.exit('--5')", "Failed", "Finished", 1, "--5"),
        ("import sys; sys.exit('\u00b2')", "Failed", "Finished", 1, "\u00b2"),
        ("import sys; sys.exit(-3)", "Failed", "Finished", 253, ""),
        ("import sys; sys.exit(1 << 70)", "Failed", "Finished", 255, ""),
        ("while True: pass", "Failed", "TimeLimitExceeded", None, ""),
        ("x = bytearray(2 << 30)", "Failed", "Finished", 1, "MemoryError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV); os.abort()", "Failed", "Finished", 137, ""),
    ],
)
def test_sandbox_fusions_statuses(url: str, code: str, status: str, run_status: str, return_code: int | None, said: str) -> None:
    request = {"code": code, "language": "python", "run_timeout": 0.7 if run_status == "TimeLimitExceeded" else 20}
    answer = httpx.post(f"{url}/run_code", json=request, timeout=40).json()
    run = answer["run_result"]
    assert (answer["status"], run["status"], run["return_code"]) == (status, run_status, return_code), answer
    assert said in run["stderr"]


def test_our_fusion_client_and_our_fusion_server_agree(url: str) -> None:
    """The SandboxFusion client of this project works with the SandboxFusion route of its server."""

    async def talking() -> None:
        async with FusionSandbox(url) as pool, await pool.open(images={"image_0": Image.new("RGB", (64, 48), (1, 2, 3))}) as box:
            shown = await box.run("image_0.crop((0, 0, 32, 30)).show()\nprint(image_0.size)")
            sizes = [(image.width, image.height) for image in shown.images]
            assert (shown.text, shown.fault, sizes) == ("(64, 48)\n", Fault.NONE, [(32, 30)])
            wrong = await box.run("\n1 / 0")
            assert wrong.error is not None
            assert (wrong.error.type, wrong.error.line, wrong.state_lost) == ("ZeroDivisionError", 2, True)

    asyncio.run(talking())


def test_sandbox_fusions_other_languages_are_refused(url: str) -> None:
    answer = httpx.post(f"{url}/run_code", json={"code": "int main() {}", "language": "cpp"}).json()
    assert (answer["status"], answer["run_result"]) == ("SandboxError", None)
    assert "'cpp'" in answer["message"]


def _png(image: Image.Image) -> bytes:
    buffer = BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
