"""Attacks on a server's time, memory, connections and log."""

import json
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from socket import MSG_PEEK, socket
from typing import Any

from benchmarks.probes.sites import num_open
from megatron_rl_sandbox.connections import ConnectionRegistry

LINES = 24
"""Number of connections that a client opens."""
WAIT_S = 3.0
"""Seconds to wait: three times the server's timeout."""
SHORT = ConnectionRegistry(header_timeout_s=1.0, body_timeout_s=1.0, response_timeout_s=1.0, max_connections=LINES // 3)
TO_BOXES = (("Host", "127.0.0.1"), ("Content-Type", "application/json"))


def slow(begin: bytes, drop: bytes) -> Callable[[Any, Path], str]:
    """Return an attack that sends endless requests on several connections."""

    def attack(server: Any, folder: Path) -> str:
        with server(folder) as site, ExitStack() as held:
            lines = [held.enter_context(site.connect()) for _ in range(LINES // 4)]
            for line in lines:
                line.sendall(begin)
            end = time.monotonic() + WAIT_S
            while time.monotonic() < end:
                time.sleep(0.2)
                for line in lines:
                    with suppress(OSError):
                        line.sendall(drop)
            left = num_open(lines)
        return f"{left} of {len(lines)} connections are kept open" if left else ""

    return attack


def holds_many_lines(server: Any, folder: Path) -> str:
    """Return a success message if more silent connections stay open than allowed, else ""."""
    with server(folder) as site, ExitStack() as held:
        lines = [held.enter_context(site.connect()) for _ in range(LINES)]
        time.sleep(0.5)
        left = num_open(lines)
    return f"{left} silent connections are kept open" if left > SHORT.max_connections else ""


def reads_no_answer(server: Any, folder: Path) -> str:
    """Return a success message if unread responses stay in the server's memory, else "".

    The client requests responses of 16 MB and does not read them.
    """
    with server(folder) as site, ExitStack() as held:
        box = json.loads(site.ask("POST", "/boxes", *TO_BOXES, body=b"{}")[1].rpartition(b"\r\n\r\n")[2])["box"]
        body = b'{"names": ["12000000"]}'
        request = b"POST /boxes/%s/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        lines = [held.enter_context(site.connect()) for _ in range(3)]
        for line in lines:
            line.sendall(request % (box.encode(), len(body), body))
        for line in lines:
            line.recv(1, MSG_PEEK)
        time.sleep(WAIT_S)
        whole = sum(_rest_of(line) >= 16_000_000 for line in lines)
    return f"{whole} of {len(lines)} unread responses are kept in memory" if whole else ""


def _rest_of(line: socket) -> int:
    """Receive the remaining bytes, up to about 16 MB, and return their number."""
    size = 0
    with suppress(OSError):
        while size < 16_000_000 and (part := line.recv(1 << 20)):
            size += len(part)
    return size


def sends_without_end(server: Any, folder: Path) -> str:
    """Return a success message if the server accepts a chunked body above its limit, else "".

    The body has 64 MB; the server accepts 8 MB.
    """
    with server(folder) as site, site.connect() as line:
        line.sendall(b"POST /boxes HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        with suppress(OSError):
            for _ in range(64):
                line.sendall(chunk)
            return "the whole body is accepted"
    return ""


def holds_large_bodies(server: Any, folder: Path) -> str:
    """Return a success message if many incomplete bodies stay in memory, else "".

    The client sends sixteen requests with bodies of 7 MB, but omits the last byte of each.
    """
    with server(folder) as site, ExitStack() as held:
        head = b"POST /boxes HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 7000001\r\n\r\n"
        lines = [held.enter_context(site.connect()) for _ in range(16)]
        for line in lines:
            with suppress(OSError):
                line.sendall(head + b" " * 7_000_000)
        time.sleep(1.0)
        left = num_open(lines)
    return f"{left} bodies of 7 MB are kept in memory" if left > 8 else ""


def sends_many_names(server: Any, folder: Path) -> str:
    """Return a success message if the server parses two million file names, else "".

    The request body has 25 MB of JSON; the parsed objects would take many times as much memory.
    """
    body = bytearray(b'{"files": {"a":""')
    for number in range(2_000_000):
        body += b',"%x":""' % number
    with server(folder) as site:
        _, answer = site.ask("POST", "/boxes", *TO_BOXES, body=bytes(body + b"}}"))
    return "" if b"commas and opening brackets" in answer else "all names are parsed"


def fills_the_log(server: Any, folder: Path) -> str:
    """Return a success message if invalid requests cause too many log lines, else ""."""
    with server(folder) as site:
        for _ in range(100):
            with site.connect() as line, suppress(OSError):
                line.sendall(b"\0\1\2 no request\r\n\r\n")
                line.recv(1 << 12)
    return f"{len(site.log)} log lines are written" if len(site.log) > 30 else ""
