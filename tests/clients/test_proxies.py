"""Tests which requests use the environment's proxy, over real HTTP: a judge that is served here,
and a proxy that records or refuses requests.
"""

import ast
import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest

from megatron_rl.clients.proxies import find_proxy, proxy_hint
from megatron_rl.config import ListenerSettings
from megatron_rl.errors import InfraError
from megatron_rl.rewards.judge import Judge
from megatron_rl.services.supervised_process import find_free_port
from megatron_rl.tasks.lewis.listener_client import ListenerClient
from tests.conftest import ROOT
from tests.support.fake_judge_server import PROMPT, answer_correct, make_judge_settings, prompt_fields, run_judge, serve_judge

MODELS = b'{"object": "list", "data": [{"id": "judge", "object": "model", "created": 1, "owned_by": "me"}]}'
NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@contextmanager
def proxying(*, status: int = 200) -> Iterator[tuple[str, list[str]]]:
    """Serve a proxy that answers all requests itself; yield its URL and the requested addresses."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(MODELS)))
            self.end_headers()
            self.wfile.write(MODELS)

        def log_message(self, *given: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def refusing() -> str:
    """Return a URL that refuses connections."""
    return f"http://127.0.0.1:{find_free_port('127.0.0.1')}"


def start(judge: Judge) -> None:
    async def started() -> None:
        try:
            await judge.start()
        finally:
            await judge.close()

    asyncio.run(started())


@pytest.mark.known_failure("judge-behind-proxy")
@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
def test_a_judge_on_this_machine_is_asked_directly(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, refusing())
    with serve_judge(answer_correct) as server:
        judge = run_judge(make_judge_settings(server), lambda judge: judge.score(PROMPT, fields=prompt_fields()))
    assert (len(server.bodies), judge.endpoints.failures) == (1, 0)


@pytest.mark.parametrize("wrong", ["nonsense://p:1", "http://p:port", "socks4://p:1"])
def test_a_proxy_that_is_none_harms_nobody_who_needs_it_not(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", wrong)
    with serve_judge(answer_correct) as server:
        assert run_judge(make_judge_settings(server), lambda judge: judge.score(PROMPT, fields=prompt_fields())).endpoints.failures == 0
    server.url = "http://judge.invalid/v1"
    with pytest.raises(InfraError, match=rf"^HTTP_PROXY={wrong}: not a usable proxy; .*NO_PROXY=judge.invalid"):
        start(Judge(make_judge_settings(server)))


def test_a_judge_elsewhere_is_asked_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_judge(answer_correct) as server, proxying() as (proxy, asked):
        monkeypatch.setenv("http_proxy", proxy)
        server.url = "http://judge.invalid:8000/v1"
        start(Judge(make_judge_settings(server)))
    assert asked == ["http://judge.invalid:8000/v1/models"]


def test_an_error_names_the_proxy_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    place = refusing().removeprefix("http://")
    monkeypatch.setenv("HTTP_PROXY", f"http://me:SECRET@{place}")
    with serve_judge(answer_correct) as server:
        server.url = "http://judge.invalid:8000/v1"
        line = rf"judge.invalid.*ConnectError.* \(sent through HTTP_PROXY=\*\*\*@{place}; unset it, or set NO_PROXY=judge.invalid\)"
        with pytest.raises(InfraError, match=line) as told:
            start(Judge(make_judge_settings(server)))
    assert "SECRET" not in str(told.value)


def test_what_the_proxy_itself_refuses_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_judge(answer_correct) as server, proxying(status=403) as (proxy, _):
        monkeypatch.setenv("HTTP_PROXY", proxy)
        server.url = "http://judge.invalid:8000/v1"
        with pytest.raises(InfraError, match=rf"sent through HTTP_PROXY={proxy}; unset it"):
            start(Judge(make_judge_settings(server)))


@pytest.mark.parametrize("uses", [False, True])
def test_listeners_are_asked_through_it_where_that_is_set(uses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", refusing())
    client = ListenerClient(ListenerSettings(urls=["http://listener.invalid:1"], proxy=uses))
    with pytest.raises(InfraError, match="no listener is available") as told:
        asyncio.run(client.start())
    assert ("sent through HTTP_PROXY" in str(told.value)) == uses


OWN = next(each.address for found in psutil.net_if_addrs().values() for each in found if each.family == socket.AF_INET)


@pytest.mark.parametrize(
    ("url", "no_proxy", "is_asked_through"),
    [
        ("http://localhost:1/v1", "", False),
        ("http://a.localhost/v1", "", False),
        ("http://127.8.0.1/v1", "", False),
        ("http://[::1]:1/v1", "", False),
        ("http://0.0.0.0:1/v1", "", False),
        (f"http://{socket.gethostname()}:1/v1", "", False),
        (f"http://{OWN}:1/v1", "", False),
        ("http://judge:1/v1", "", True),
        ("http://10.1.2.3:1/v1", "", True),
        ("http://10.1.2.3:1/v1", "10.0.0.0/8", False),
        ("http://11.1.2.3:1/v1", "10.0.0.0/8, nonsense", True),
        ("http://10.1.2.3:1/v1", "10.1.2.3", False),
        ("http://[fd00::7]:1/v1", "fd00::/8", False),
        ("http://a.lab.org/v1", "lab.org", False),
        ("http://a.lab.org/v1", ".lab.org", False),
        ("http://a.lab.org/v1", "*.lab.org", False),
        ("http://alab.org/v1", "lab.org", True),
        ("http://anything/v1", "*", False),
        ("https://anything/v1", "", False),  # only HTTP_PROXY is set
    ],
)
def test_who_is_asked_through_a_proxy(url: str, no_proxy: str, is_asked_through: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "proxy:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert (find_proxy(url) is not None) == is_asked_through == bool(proxy_hint(url))


def test_no_other_client_reads_the_environment() -> None:
    """Every httpx client of the packages passes trust_env=False or a transport, or gets its proxies
    from proxy_options.
    """
    makers, found = {"get", "post", "put", "delete", "request", "stream", "Client", "AsyncClient", "DefaultAsyncHttpx2Client"}, []
    for path in (*(ROOT / "megatron_rl").rglob("*.py"), *(ROOT / "sandbox").rglob("*.py")):
        if "attack" in path.parts:
            continue
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            match call.func:
                case ast.Attribute(value=ast.Name(id="httpx" | "httpx2" | "openai"), attr=name) if name in makers:
                    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg}
                    splats = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is None]
                    is_told = given.get("trust_env") == "False" or "transport" in given or any("proxy_options(" in each for each in splats)
                    found.append((f"{path.relative_to(ROOT)}:{call.lineno}", is_told))
    assert len(found) >= 3 and [place for place, is_told in found if not is_told] == []
