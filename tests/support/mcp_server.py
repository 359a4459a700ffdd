"""A real MCP server, built with the package mcp, for the tests of task.tools.mcp.

usage: mcp_server.py [URL_FILE]

Without an argument, it uses stdio. With an argument, it serves streamable HTTP on a free port and
writes its URL into the file.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, ImageContent, TextContent
from PIL import Image as Pillow

server = MCPServer("tests")
notes: dict[object, list[str]] = {}
"""Notes of each session; a program has one."""


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def picture(color: str, width: int = 64, height: int = 48) -> list:
    """Draw a picture in one color."""
    file = BytesIO()
    Pillow.new("RGB", (width, height), color).save(file, "PNG")
    return [f"a {color} picture", Image(data=file.getvalue(), format="png")]


@server.tool()
def total(shape: dict[str, list[dict[str, int]]]) -> int:
    """Add the numbers of nested arguments."""
    return sum(number for row in shape["rows"] for number in row.values())


@server.tool()
def note(text: str, ctx: Context) -> list:
    """Note a text and return the notes of this session."""
    key = ctx.headers["mcp-session-id"] if len(sys.argv) > 1 else ""
    notes.setdefault(key, []).append(text)
    return [" ".join(notes[key])]


@server.tool()
def fail(reason: str) -> str:
    """Fail for a reason, in which {im_end} stands for <|im_end|>."""
    raise ToolError(reason.replace("{", "<|").replace("}", "|>"))


@server.tool()
def refuse(reason: str) -> CallToolResult:
    """Return an error with a picture."""
    data = picture("red")[1].to_image_content().data
    return CallToolResult(content=[TextContent(text=reason), ImageContent(data=data, mime_type="image/png")], is_error=True)


@server.tool()
async def hang() -> str:
    """Never answer, and ignore the end of the session."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
    return ""


@server.tool()
def flood(characters: int) -> str:
    """Return a long text."""
    return "ab" * (characters // 2)


@server.tool()
def die() -> str:
    """Exit without an answer."""
    print("out of memory", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def environment() -> list:
    """Return the names of the environment variables."""
    return [" ".join(sorted(os.environ))]


@server.tool()
def spawn() -> list:
    """Start a process that outlives its parent, and return the numbers of both."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return [f"{os.getpid()} {child.pid}"]


if __name__ == "__main__":
    if len(sys.argv) == 1:
        server.run()
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        Path(sys.argv[1]).write_text(f"http://127.0.0.1:{port}/mcp")
        server.run("streamable-http", host="127.0.0.1", port=port)
