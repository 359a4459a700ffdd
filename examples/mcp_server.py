"""MCP server with one tool, for examples/mcp_tools.py.

    python examples/mcp_server.py

It uses standard input and output. The trainer starts it once per episode.
"""

from io import BytesIO

from mcp.server.mcpserver import Image, MCPServer
from PIL import Image as Pillow

COLORS = ("red", "green", "blue", "black")
server = MCPServer("dots")


def color_of(number: int) -> str:
    """Return the color of a dot."""
    return COLORS[(number * 7 + number // 3) % len(COLORS)]


@server.tool()
def show_dot(number: int) -> Image:
    """Show a dot, given its number."""
    file = BytesIO()
    Pillow.new("RGB", (56, 56), color_of(number)).save(file, "PNG")
    return Image(data=file.getvalue(), format="png")


if __name__ == "__main__":
    server.run()
