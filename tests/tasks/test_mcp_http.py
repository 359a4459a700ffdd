"""Tests the size limit of HTTP responses of an MCP server, with a real server that sends more."""

import asyncio
import gzip
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megatron_rl.config import McpServerSettings, ToolSettings
from megatron_rl.errors import InfraError
from megatron_rl.tasks.visual_python import mcp_http
from megatron_rl.tasks.visual_python.mcp_results import read_result
from megatron_rl.tasks.visual_python.mcp_session import McpSession

LIMIT = 1 << 20
CHUNK = b"x" * (1 << 16)
NUM_SENT = 256 << 20
"""Number of bytes that the server sends if its client reads them."""


@dataclass
class Server:
    """MCP server with one tool; `mode` selects its answer to a call."""

    mode: str = "short"
    sent: list[int] = field(default_factory=list)
    """Number of bytes of each long answer that could be sent."""
    url: str = ""


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            results = {
                "initialize": lambda params: {
                    "protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                    "serverInfo": {"name": "s", "version": "1"},
                },
                "tools/list": lambda _: {"tools": [{"name": "look", "inputSchema": {"type": "object"}}]},
                "tools/call": lambda _: {"content": [{"type": "text", "text": "y" * (LIMIT // 2)}]},
            }  # fmt: skip
            if "id" not in message:
                self.send_response(202)
                self.end_headers()
                return
            body = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": results[message["method"]](message.get("params"))}).encode()
            is_call = message["method"] == "tools/call"
            self.send_response(500 if is_call and state.mode == "error" else 200)
            self.send_header("Content-Type", "application/json")
            if is_call and state.mode == "gzip":
                body = gzip.compress(body[:-1] + b" " * (8 * LIMIT) + b"}")
                self.send_header("Content-Encoding", "gzip")
            if is_call and state.mode in ("long", "error"):
                self.end_headers()
                self.send_long(body)
                return
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def send_long(self, body: bytes) -> None:
            """Send JSON without an end until the client closes the connection."""
            num = 0
            try:
                self.wfile.write(body[:-4])
                while num < NUM_SENT:
                    self.wfile.write(CHUNK)
                    num += len(CHUNK)
            except OSError:
                pass
            state.sent.append(num)
            self.close_connection = True

        def do_GET(self) -> None:
            self.send_error(405)

        do_DELETE = do_GET

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    state.url = f"http://127.0.0.1:{http.server_port}/mcp"
    yield state
    http.shutdown()
    http.server_close()


def call(server: Server) -> str:
    """Open a session and return the text of one call."""

    async def run() -> str:
        settings = ToolSettings(mcp=[McpServerSettings(name="s", url=server.url)], max_chars=LIMIT)
        session = await McpSession.open(settings.mcp[0], settings)
        try:
            assert len(await session.list_tools()) == 1
            return read_result(await session.call("look", {}), settings)[0]
        finally:
            await session.close()

    return asyncio.run(run())


def test_a_response_below_the_limit_is_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_http, "MAX_MESSAGE_BYTES", LIMIT)
    assert call(server) == "y" * (LIMIT // 2)


@pytest.mark.parametrize("mode", ["long", "error"])
def test_a_response_above_the_limit_is_not_read_to_its_end(mode: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the body of an error. The server could send only what fits into socket buffers."""
    monkeypatch.setattr(mcp_http, "MAX_MESSAGE_BYTES", LIMIT)
    server.mode = mode
    reason = f"the response has more than {LIMIT} bytes" if mode == "long" else "error response"
    with pytest.raises(InfraError, match=rf"^task.tools.mcp\[s\]: the server failed \(MCPError: .*{reason}"):
        call(server)
    assert len(server.sent) == 1 and server.sent[0] < 32 << 20 < NUM_SENT


def test_a_compressed_response_is_not_decoded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a few kilobytes, but eight times the limit when it is decoded."""
    monkeypatch.setattr(mcp_http, "MAX_MESSAGE_BYTES", LIMIT)
    server.mode = "gzip"
    with pytest.raises(InfraError, match="Failed to parse JSON response"):
        call(server)
