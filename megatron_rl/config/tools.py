"""Settings of the tools that MCP servers offer to the policy."""

import math
from dataclasses import dataclass, field

from megatron_rl.config.checks import require, require_url


@dataclass(kw_only=True, slots=True)
class McpServerSettings:
    """An MCP server (Model Context Protocol), which is a program or a URL."""

    name: str = ""
    """Name of the server in messages."""
    command: list[str] = field(default_factory=list)
    """Program and arguments of a server that uses standard input and output (transport stdio). Each
    episode has its own process. The program is looked up in PATH and runs in the run's folder."""
    url: str = ""
    """URL of a running server (transport streamable HTTP), e.g. http://node2:8000/mcp. Each episode
    has its own session."""
    token_file: str = ""
    """File with the access token of the server at `url`, sent as a bearer token."""
    env: list[str] = field(default_factory=list)
    """Names of environment variables that the program receives, in addition to HOME, LOGNAME, PATH,
    SHELL, TERM and USER. No other variable of the run is passed on."""
    tools: list[str] = field(default_factory=list)
    """Names of the server's tools that the policy may call; empty offers all of them."""

    def __post_init__(self) -> None:
        require(bool(self.name), "task.tools.mcp", self.url or self.command, "has no name; add name: NAME")
        remedy = "needs either command, the program of the server, or url, the address of a running server"
        require(bool(self.command) != bool(self.url), self.key, {"command": self.command, "url": self.url}, remedy)
        if self.url:
            require_url(f"{self.key}.url", self.url, path="/mcp")
            require(not self.env, f"{self.key}.env", self.env, "belongs to a server with a command; remove this setting")
        require(
            bool(self.url) or not self.token_file, f"{self.key}.token_file", self.token_file, "belongs to a server with a url; remove it"
        )
        require("" not in self.command[:1], f"{self.key}.command", self.command, "names no program; use [PROGRAM,ARGUMENT,...]")

    @property
    def key(self) -> str:
        """Key of the server in messages, such as `task.tools.mcp[search]`."""
        return f"task.tools.mcp[{self.name}]"


@dataclass(kw_only=True, slots=True)
class ToolSettings:
    """Tools of MCP servers, in addition to the tools of task.tool_format=functions."""

    mcp: list[McpServerSettings] = field(default_factory=list)
    """MCP servers, each with name and command or url, e.g. [{name:search,command:[python,/a/s.py]}]
    or [{name:maps,url:'http://node2:8000/mcp',token_file:/a/token}] (docs/agents.md)."""
    call_timeout_s: float = 60.0
    """Timeout of one tool call in seconds; if it expires, the episode fails."""
    startup_timeout_s: float = 60.0
    """Maximum time in seconds in which a server must start and list its tools."""
    max_episodes: int = 64
    """Maximum number of episodes that are connected to the servers at the same time; further
    episodes wait at their first call. A server with a command has this many processes at most."""
    max_chars: int = 8192
    """Maximum number of characters of a result; of a longer text, the first and the last half of
    this number are kept."""
    max_images: int = 5
    """Maximum number of images of a result; further images are left out."""
    max_pixels: int = 12_000_000
    """Maximum total number of pixels of the images of a result, before they are resized; an image
    that exceeds the limit is left out."""

    def __post_init__(self) -> None:
        names = [server.name for server in self.mcp]
        twice = next((name for name in names if names.count(name) > 1), "")
        require(not twice, "task.tools.mcp", names, f"contains the name {twice} twice; choose different names")
        for key, value in (("call_timeout_s", self.call_timeout_s), ("startup_timeout_s", self.startup_timeout_s)):
            require(0 < value < math.inf, f"task.tools.{key}", value, "must be a positive, finite number of seconds")
        for key, value in (("max_episodes", self.max_episodes), ("max_chars", self.max_chars)):
            require(value >= 1, f"task.tools.{key}", value, "must be at least 1")
        for key, value in (("max_images", self.max_images), ("max_pixels", self.max_pixels)):
            require(value >= 0, f"task.tools.{key}", value, "must not be negative")
