"""Tools of MCP servers: a server that is built with the package mcp, over stdio and streamable
HTTP, and a server written by hand for lists and results that break rules.

tests/e2e/test_mcp_task.py has episodes.
"""

import asyncio
import base64
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import psutil
import pytest
from mcp.types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from PIL import Image

from megatron_rl.config import McpServerSettings, ToolSettings
from megatron_rl.errors import AccessDenied, InfraError, PermanentInfraError
from megatron_rl.supervisor import TERM_GRACE_S
from megatron_rl.tasks.visual_python.mcp_results import read_result, truncate_text
from megatron_rl.tasks.visual_python.mcp_tools import EpisodeTools, McpTools
from megatron_rl.types import ToolCall
from tests.conftest import ROOT
from tests.support import mcp_server

REAL = ROOT / "tests" / "support" / "mcp_server.py"
SCRIPTED = ROOT / "tests" / "support" / "scripted_mcp_server.py"
TOOL = {"name": "look", "inputSchema": {"type": "object"}}
ODD = {"name": "odd", "inputSchema": {"type": "object", "properties": {"x": {"type": "lot"}}}}


def real(name: str = "real", **given: Any) -> McpServerSettings:
    return McpServerSettings(name=name, command=[sys.executable, str(REAL)], **given)


def scripted(*tools: object, result: object = (), name: str = "scripted", **given: Any) -> McpServerSettings:
    said = result if isinstance(result, str) else json.dumps(result)
    return McpServerSettings(name=name, command=[sys.executable, str(SCRIPTED), json.dumps(tools), said], **given)


@pytest.fixture(scope="module")
def programs() -> McpTools:
    """The real server as a program of each episode, after its tools were listed."""
    tools = McpTools(ToolSettings(mcp=[real()], max_chars=401, call_timeout_s=30))
    asyncio.run(tools.list_tools(("python", "zoom", "rotate")))
    return tools


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a running server."""
    file = tmp_path_factory.mktemp("mcp") / "url"
    with subprocess.Popen([sys.executable, str(REAL), str(file)], stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 60
            while not (file.exists() and file.read_text() and is_open(file.read_text())):
                assert process.poll() is None and time.monotonic() < deadline, "the server does not start"
                time.sleep(0.1)
            yield file.read_text()
        finally:
            process.kill()


def is_open(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.split(":")[2].partition("/")[0]))) == 0


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 120))


async def call_all(tools: McpTools, *calls: tuple[str, dict]) -> list[tuple[ToolCall, list[Image.Image]]]:
    """Make calls in one episode."""
    episode = EpisodeTools(tools)
    try:
        return [await episode.call(name, arguments) for name, arguments in calls]
    finally:
        await episode.close()


async def play(server: McpServerSettings, *calls: tuple[str, dict], **limits: Any) -> list[tuple[ToolCall, list[Image.Image]]]:
    tools = McpTools(ToolSettings(mcp=[server], **limits))
    await tools.list_tools(("python",))
    return await call_all(tools, *calls)


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_a_real_server_is_listed_and_called(transport: str, url: str, programs: McpTools) -> None:
    """The list equals the server's own. Results are compared with Python's and Pillow's. Two
    episodes at the same time have their own state.
    """
    running = McpTools(ToolSettings(mcp=[McpServerSettings(name="real", url=url)], max_chars=401))
    tools = programs if transport == "stdio" else running

    async def calls() -> Any:
        listed = await tools.list_tools(("python", "zoom", "rotate"))
        shape = {"rows": [{"a": 1, "b": 2}, {"c": 40}]}
        first = call_all(
            tools,
            ("add", {"a": 2, "b": 3}),
            ("picture", {"color": "teal"}),
            ("total", {"shape": shape}),
            ("note", {"text": "one"}),
            ("fail", {"reason": "no {im_end} map"}),
            ("add", {"a": "two", "b": 3}),
            ("refuse", {"reason": "closed"}),
            ("flood", {"characters": 10_000_000}),
            ("note", {"text": "two"}),
        )
        return listed, await asyncio.gather(first, call_all(tools, ("note", {"text": "other"})))

    listed, (results, other) = run(calls())
    own = asyncio.run(mcp_server.server.list_tools())
    assert listed == tuple({"name": each.name, "description": each.description, "parameters": each.input_schema} for each in own)
    added, painted, total, one, failed, rejected, refused, flooded, both = [call for call, _ in results]
    assert (added.text, added.error, added.tool, json.loads(added.source), added.ran) == ("5", "", "add", {"a": 2, "b": 3}, True)
    assert painted.text == "a teal picture" and total.text == "43"
    (shown,) = results[1][1]
    assert shown.size == (64, 48) and shown.getcolors() == [(64 * 48, (0, 128, 128))]
    assert failed.error == "Error executing tool fail: no <|im_end|> map" and failed.text == f"Error: {failed.error}"
    assert "valid integer" in rejected.error and rejected.text.startswith("Error: ")
    assert (refused.text, refused.error, results[6][1][0].getpixel((0, 0))) == ("Error: closed", "closed", (255, 0, 0))
    assert flooded.text == "ab" * 100 + "a\n[... 9999599 characters were left out ...]\n" + "ab" * 100
    assert (one.text, both.text, other[0][0].text) == ("one", "one two", "other"), "episodes do not share a session"


def test_a_program_sees_only_named_variables(monkeypatch: pytest.MonkeyPatch, programs: McpTools) -> None:
    """The program receives the variables of MCP's convention and the named ones; the keys of the
    run are not among them.
    """
    for name in ("OPENAI_API_KEY", "WANDB_API_KEY", "HF_TOKEN", "RANK", "MAPS_KEY"):
        monkeypatch.setenv(name, "secret")
    server = programs.settings.mcp[0]
    monkeypatch.setattr(server, "env", ["MAPS_KEY"])
    ((call, _),) = run(call_all(programs, ("environment", {})))
    names = {*call.text.split()}
    assert "MAPS_KEY" in names and names <= {"HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LC_CTYPE", "MAPS_KEY"}


def test_a_program_that_fails_is_an_infrastructure_error(programs: McpTools, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that dies or hangs in a call fails the episode, and the error names the program's
    last line or the setting. A program that hangs is ended, although it ignores SIGTERM.
    """
    with pytest.raises(InfraError, match=r"^task.tools.mcp\[real\]: the server failed \(MCPError: Connection closed; out of memory\)$"):
        run(call_all(programs, ("die", {})))
    monkeypatch.setattr(programs.settings, "call_timeout_s", 1)
    with pytest.raises(InfraError, match=r"took more than task.tools.call_timeout_s=1 seconds to answer the call of hang"):
        run(call_all(programs, ("hang", {})))
    commands = [child.cmdline() for child in psutil.Process().children(recursive=True)]
    assert [command for command in commands if command[-1:] == [str(REAL)]] == []


def test_a_url_without_a_server_is_an_infrastructure_error(url: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}/mcp"
        with pytest.raises(InfraError, match=r"^task.tools.mcp\[gone\]: the server failed \(Connect.*http://127"):
            run(McpTools(ToolSettings(mcp=[McpServerSettings(name="gone", url=nobody)])).list_tools(()))
    elsewhere = McpServerSettings(name="lost", url=url.removesuffix("mcp") + "other")
    with pytest.raises(InfraError, match=r"^task.tools.mcp\[lost\]: the server failed .*Not Found; http://127"):
        run(McpTools(ToolSettings(mcp=[elsewhere])).list_tools(()))


def test_servers_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    """After SIGKILL of the run, neither the server nor a process that it started remains, although
    the server is stuck in a call and ignores SIGTERM.
    """
    code = f"""
import asyncio, sys
from tests.tasks.test_mcp_tools import McpTools, ToolSettings, EpisodeTools, real

async def main():
    tools = McpTools(ToolSettings(mcp=[real()]))
    await tools.list_tools(())
    episode = EpisodeTools(tools)
    call, _ = await episode.call("spawn", {{}})
    stuck = asyncio.create_task(episode.call("hang", {{}}))
    await asyncio.sleep(1)
    print(call.text, flush=True)
    await stuck

sys.path.insert(0, {str(ROOT)!r})
asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as trainer:
        assert trainer.stdout is not None
        started = [psutil.Process(int(number)) for number in trainer.stdout.readline().split()]
        trainer.send_signal(signal.SIGKILL)
    assert len(started) == 2
    _, alive = psutil.wait_procs(started, timeout=4 * TERM_GRACE_S)
    assert alive == []


LISTS = {
    "no tools": ([scripted()], "task.tools.mcp[scripted]: the server lists no tools; remove the server, or repair it"),
    "a built-in name": (
        [scripted({**TOOL, "name": "python"}, TOOL)],
        "task.tools.mcp[scripted]: the tool python is also a tool of task.tool_format=functions; offer only its other tools: tools:[look]",
    ),
    "a name of another server": (
        [scripted(TOOL, name="one"), scripted(TOOL, name="two")],
        "task.tools.mcp[two]: the tool look is also a tool of task.tools.mcp[one]; remove one of the servers",
    ),
    "no object": (
        [scripted(TOOL, {"name": "odd", "inputSchema": {"type": "array"}})],
        "task.tools.mcp[scripted]: the list of tools is not that of MCP (tools.1.inputSchema.type: Input should be 'object'); repair ",
    ),
    "no schema": (
        [scripted(TOOL, ODD)],
        "task.tools.mcp[scripted]: the parameters of the tool odd are no JSON schema ('lot' is not valid under any of the given schemas); "
        "repair the server, or offer its other tools: tools:[look]",
    ),
    "no schema at all": (
        [scripted({"name": "odd"})],
        "task.tools.mcp[scripted]: the list of tools is not that of MCP (tools.0.inputSchema: ",
    ),
    "an unknown tool": (
        [scripted(TOOL, tools=["lok"])],
        "task.tools.mcp[scripted].tools=lok: is not a tool of this server; choose from look",
    ),
    "a program that exits": (
        [McpServerSettings(name="licensed", command=[sys.executable, "-c", "import sys; sys.exit('no licence')"])],
        "task.tools.mcp[licensed]: the server failed (MCPError: Connection closed; no licence)",
    ),
}


@pytest.mark.parametrize(("servers", "message"), LISTS.values(), ids=LISTS)
def test_a_list_that_breaks_a_rule_is_refused(servers: list[McpServerSettings], message: str) -> None:
    with pytest.raises(InfraError) as refused:
        run(McpTools(ToolSettings(mcp=servers)).list_tools(("python",)))
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)


def test_a_program_that_never_speaks_is_refused_in_time() -> None:
    silent = McpServerSettings(
        name="silent", command=[sys.executable, "-c", "import sys, time; print('Hi', file=sys.stderr, flush=True); time.sleep(60)"]
    )
    with pytest.raises(InfraError, match=r"took more than task.tools.startup_timeout_s=0.7 seconds to start \(its last line: Hi\)"):
        run(McpTools(ToolSettings(mcp=[silent], startup_timeout_s=0.7)).list_tools(()))


def test_only_the_offered_tools_are_listed() -> None:
    """`tools` selects tools; the schema of a tool that is not offered may be invalid."""
    server = scripted(TOOL, ODD, tools=["look"])
    assert run(McpTools(ToolSettings(mcp=[server])).list_tools(())) == (
        {"name": "look", "description": "", "parameters": {"type": "object"}},
    )


def test_an_error_of_json_rpc_is_the_policys_only_if_it_rejects_the_arguments() -> None:
    ((call, pictures),) = run(play(scripted(TOOL, result="error -32602 x must be positive"), ("look", {"x": -1})))
    assert (call.text, call.error, pictures) == ("Error: x must be positive", "x must be positive", [])
    with pytest.raises(InfraError, match=r"task.tools.mcp\[scripted\]: the server failed \(MCPError: disk full; "):
        run(play(scripted(TOOL, result="error -32603 disk full"), ("look", {})))


def test_missing_parts_are_refused_before_a_server_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refusal(server: McpServerSettings) -> str:
        with pytest.raises(ValueError, match="^task.tools.mcp") as refused:
            McpTools(ToolSettings(mcp=[server]))
        return str(refused.value)

    assert refusal(McpServerSettings(name="a", command=["no_such_program"])) == (
        "task.tools.mcp[a].command=no_such_program: is not an executable program in PATH"
    )
    unset = McpServerSettings(name="a", command=[sys.executable], env=["NO_SUCH_VARIABLE"])
    assert refusal(unset) == "task.tools.mcp[a].env=['NO_SUCH_VARIABLE']: is not set; export it, or remove it from the list"
    nothing = McpServerSettings(name="a", url="http://x/mcp", token_file=str(tmp_path / "none"))
    assert refusal(nothing).startswith(f"task.tools.mcp[a].token_file={tmp_path}/none: [Errno 2]")
    monkeypatch.setattr("megatron_rl.tasks.visual_python.mcp_tools.find_spec", lambda name: None)
    assert refusal(real()) == "task.tools.mcp=real: needs the package mcp: pip install 'mcp>=2.3,<3'"


def test_a_token_is_sent_and_a_rejected_one_stops_the_run(tmp_path: Path) -> None:
    """A server that answers 401 received the token of the file, and the error is AccessDenied."""
    seen: list[str | None] = []

    class Guard(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(self.headers["Authorization"])
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    (tmp_path / "token").write_text("0123456789abcdef")
    guard = HTTPServer(("127.0.0.1", 0), Guard)
    threading.Thread(target=guard.serve_forever, daemon=True).start()
    try:
        at = f"http://127.0.0.1:{guard.server_port}/mcp"
        server = McpServerSettings(name="maps", url=at, token_file=str(tmp_path / "token"))
        with pytest.raises(AccessDenied) as denied:
            run(McpTools(ToolSettings(mcp=[server])).list_tools(()))
        assert str(denied.value) == f"task.tools.mcp[maps].url={at}: the server rejects the token; set token_file: FILE"
        assert {*seen} == {"Bearer 0123456789abcdef"}
    finally:
        guard.shutdown()
        guard.server_close()


def test_further_episodes_wait_for_a_slot() -> None:
    """With one slot, the second episode starts its program only after the first episode ended."""

    def count() -> int:
        return sum(str(SCRIPTED) in child.cmdline() for child in psutil.Process().children())

    async def two() -> tuple[list[int], list[str]]:
        tools = McpTools(ToolSettings(mcp=[scripted(TOOL, result=[{"type": "text", "text": "seen"}])], max_episodes=1))
        await tools.list_tools(())
        first, second = EpisodeTools(tools), EpisodeTools(tools)
        calls = [await first.call("look", {}), await first.call("look", {})]
        waiting = asyncio.create_task(second.call("look", {}))
        await asyncio.sleep(1.0)
        counts = [count()]
        await first.close()
        calls.append(await waiting)
        counts.append(count())
        await second.close()
        return [*counts, count()], [call.text for call, _ in calls]

    assert run(two()) == ([1, 1, 0], ["seen"] * 3)


def encode(picture: Image.Image, kind: str = "PNG") -> str:
    file = BytesIO()
    picture.save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def bomb(width: int, height: int) -> str:
    """Return a PNG of a few hundred bytes that claims to have this size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    return base64.b64encode(png).decode()


def picture_of(data: str, kind: str = "image/png") -> ImageContent:
    return ImageContent(data=data, mime_type=kind)


RED = Image.new("RGB", (30, 20), "red")
RESULTS = {
    "nothing": ([], {}, "The tool gave nothing back.", []),
    "texts": ([TextContent(text="a"), TextContent(text="b")], {}, "a\nb", []),
    "no Unicode": ([TextContent(text="a\ud800")], {}, "a?", []),
    "a file of text": ([EmbeddedResource(resource=TextResourceContents(uri="file:///a", text="inside"))], {}, "inside", []),
    "a link": ([ResourceLink(name="a", uri="http://a/b")], {}, "http://a/b", []),
    "audio": ([AudioContent(data="", mime_type="audio/wav")], {}, "(audio of type audio/wav was left out)", []),
    "a file": (
        [EmbeddedResource(resource=BlobResourceContents(uri="file:///a", blob="", mime_type="application/zip"))],
        {},
        "(a file of type application/zip was left out)",
        [],
    ),
    "an image file": (
        [EmbeddedResource(resource=BlobResourceContents(uri="file:///a", blob=encode(RED), mime_type="image/png"))],
        {},
        "",
        [(30, 20)],
    ),
    "a wrong type": ([picture_of(encode(RED, "GIF"), "image/jpeg")], {}, "", [(30, 20)]),
    "no base64": ([picture_of("a-b")], {}, "(image 1 of the result was left out: it is not base64 (Only base64 data is allowed))", []),
    "no image": ([picture_of(base64.b64encode(b"%PDF-1.7").decode())], {}, "(image 1 of the result was left out: is a PDF; ...)", []),
    "half an image": (
        [picture_of(base64.b64encode(base64.b64decode(encode(RED))[:60]).decode())],
        {},
        "(image 1 of the result was left out: cannot be opened (...))",
        [],
    ),
    "a bomb": ([picture_of(bomb(20000, 20000))], {}, "(image 1 of the result was left out: Image size (400000000 pixels) exceeds ...)", []),
    "many pixels": (
        [picture_of(encode(RED.resize(size))) for size in ((20, 20), (20, 15), (30, 20), (29, 10))],
        {"max_pixels": 999},
        "(image 3 of the result was left out: 30x20 pixels; a result may have 999 pixels in total)",
        [(20, 20), (20, 15), (29, 10)],
    ),
    "many images": (
        [TextContent(text="see"), *[picture_of(encode(RED))] * 4],
        {"max_images": 2},
        "see\n(2 images were left out: a result may have 2 images)",
        [(30, 20)] * 2,
    ),
}


@pytest.mark.parametrize(("content", "limits", "text", "sizes"), RESULTS.values(), ids=RESULTS)
def test_results_are_read_within_the_limits(content: list, limits: dict, text: str, sizes: list[tuple[int, int]]) -> None:
    found, pictures = read_result(CallToolResult(content=content), ToolSettings(**limits))
    start, _, end = text.partition("...")
    assert (found == text) if "..." not in text else (found.startswith(start) and found.endswith(end))
    assert [picture.size for picture in pictures] == sizes and all(picture.mode == "RGB" for picture in pictures)


def test_a_long_text_keeps_its_start_and_its_end() -> None:
    assert truncate_text("abcde", 5) == "abcde"
    assert truncate_text("abcdefg", 5) == "abc\n[... 2 characters were left out ...]\nfg"
    assert truncate_text("abc", 1) == "a\n[... 2 characters were left out ...]\n"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"command": ["a"]}, "task.tools.mcp=['a']: has no name; add name: NAME"),
        ({"name": "a"}, "task.tools.mcp[a]={'command': [], 'url': ''}: needs either command, the program of the server, or url, "),
        ({"name": "a", "command": ["a"], "url": "http://a"}, "task.tools.mcp[a]={'command': ['a'], 'url': 'http://a'}: needs either "),
        ({"name": "a", "url": "a:80"}, "task.tools.mcp[a].url=a:80: is not a valid URL; use http://HOST:PORT/mcp"),
        ({"name": "a", "url": "http://u:p@a"}, "task.tools.mcp[a].url=...: contains @"),
        ({"name": "a", "url": "http://a", "env": ["B"]}, "task.tools.mcp[a].env=['B']: belongs to a server with a command"),
        ({"name": "a", "command": ["b"], "token_file": "c"}, "task.tools.mcp[a].token_file=c: belongs to a server with a url"),
        ({"name": "a", "command": [""]}, "task.tools.mcp[a].command=['']: names no program"),
    ],
)
def test_a_server_without_a_sense_is_refused(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match="^task.tools.mcp") as refused:
        McpServerSettings(**values)
    assert str(refused.value).startswith(message)


def test_limits_without_a_sense_are_refused() -> None:
    for key, value in {
        "call_timeout_s": 0,
        "startup_timeout_s": float("inf"),
        "max_episodes": 0,
        "max_chars": 0,
        "max_images": -1,
        "max_pixels": -1,
    }.items():
        with pytest.raises(ValueError, match=f"^task.tools.{key}={value}: must "):
            ToolSettings(**{key: value})
    with pytest.raises(ValueError, match="contains the name real twice"):
        ToolSettings(mcp=[real(), real()])


def test_permanent_errors_are_permanent() -> None:
    """A list that breaks a rule is not tried again; a server that fails may be."""
    with pytest.raises(PermanentInfraError):
        run(McpTools(ToolSettings(mcp=[scripted()])).list_tools(()))
