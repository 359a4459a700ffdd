"""Malicious servers on free loopback ports, each with one kind of bad response."""

import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import brotli

PAUSE_S = 0.25
"""Seconds between two parts of a slow response; shorter than any read timeout."""
GIB = 1 << 30
Answer = Callable[["Trap", socket.socket, bytes], None]
"""Function of the server, the connection and the request that writes a response."""


@dataclass
class Trap:
    """Running malicious server and the requests it received."""

    port: int
    heard: list[bytes] = field(default_factory=list)
    """First bytes of each request."""

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    def has_heard(self, words: str) -> bool:
        """Return True if a request contains these characters."""
        return any(words.encode() in each for each in self.heard)


@contextmanager
def trap(answer: Answer) -> Iterator[Trap]:
    """Run a server with this response inside a `with` block."""
    listener = socket.create_server(("127.0.0.1", 0))
    found = Trap(listener.getsockname()[1])

    def serve(line: socket.socket) -> None:
        with line, suppress(OSError):
            while asked := line.recv(1 << 16):
                found.heard.append(asked)
                answer(found, line, asked)

    def listen() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=listen, daemon=True).start()
    try:
        yield found
    finally:
        listener.close()


def says(head: str, body: bytes = b"") -> Answer:
    """Return a response with this status line and headers and a Content-Length."""
    content = f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n".encode("latin-1") + body
    return lambda found, line, asked: line.sendall(content)


def drips(begin: str, drop: bytes, *, pause_s: float = PAUSE_S) -> Answer:
    """Return a response that repeats `drop` forever after `begin`."""

    def answer(found: Trap, line: socket.socket, asked: bytes) -> None:
        line.sendall(f"HTTP/1.1 200 OK\r\n{begin}".encode())
        while True:
            line.sendall(drop)
            time.sleep(pause_s)

    return answer


def packed(encoding: str, pack: Callable[[int], bytes]) -> Answer:
    """Return a response of a gigabyte of zeros in this encoding."""
    body = pack(GIB)
    return says(f"200 OK\r\nContent-Encoding: {encoding}", body)


def deflated(num_bytes: int, *, wbits: int = 15) -> bytes:
    """Return zeros compressed with deflate."""
    made, zeros = zlib.compressobj(9, zlib.DEFLATED, wbits), bytes(1 << 20)
    return b"".join([*(made.compress(zeros) for _ in range(num_bytes >> 20)), made.flush()])


def gzipped_twice(num_bytes: int) -> bytes:
    """Return zeros compressed twice with gzip."""
    made = zlib.compressobj(9, zlib.DEFLATED, 31)
    return made.compress(deflated(num_bytes, wbits=31)) + made.flush()


def brotlied(num_bytes: int) -> bytes:
    """Return zeros compressed with brotli."""
    made, zeros = brotli.Compressor(quality=5), bytes(1 << 20)
    return b"".join([*(made.process(zeros) for _ in range(num_bytes >> 20)), made.finish()])
