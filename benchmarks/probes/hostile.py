"""Malicious servers on free loopback ports, each of which sends one kind of bad response."""

import gzip
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import brotli

PAUSE_S = 0.25
"""Seconds between two parts of a slow response; shorter than every read timeout of the clients."""
MIB, GIB = 1 << 20, 1 << 30
Answer = Callable[["Trap", socket.socket, bytes], None]
"""Function that writes a response; its arguments are server, connection and request."""


@dataclass
class Trap:
    """Running malicious server with the requests that it has received."""

    port: int
    heard: list[bytes] = field(default_factory=list)
    """First bytes of each request."""

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    def has_heard(self, words: str) -> bool:
        """Return True if any received request contains this text."""
        return any(words.encode() in each for each in self.heard)


@contextmanager
def trap(answer: Answer) -> Iterator[Trap]:
    """Run a malicious server that sends this response, for the duration of a `with` block."""
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
    """Return a response with this status line, these headers, a Content-Length and this body."""
    content = f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n".encode("latin-1") + body
    return lambda found, line, asked: line.sendall(content)


def drips(begin: str, drop: bytes, *, pause_s: float = PAUSE_S) -> Answer:
    """Return an endless response that sends `begin` once and then repeats `drop`."""

    def answer(found: Trap, line: socket.socket, asked: bytes) -> None:
        line.sendall(f"HTTP/1.1 200 OK\r\n{begin}".encode())
        while True:
            line.sendall(drop)
            time.sleep(pause_s)

    return answer


def packed(encoding: str, pack: Callable[[int], bytes]) -> Answer:
    """Return a response with a gigabyte of zeros, compressed with this content encoding."""
    body = pack(GIB)
    return says(f"200 OK\r\nContent-Encoding: {encoding}", body)


def deflated(num_bytes: int) -> bytes:
    """Return `num_bytes` zeros (a multiple of a MiB), compressed with deflate and without a header.

    A MiB is compressed once and repeated, which is a hundred times faster than compressing all.
    """
    made = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    block = made.compress(bytes(MIB)) + made.flush(zlib.Z_FULL_FLUSH)
    return block * (num_bytes // MIB) + made.flush()


def gzipped_twice(num_bytes: int) -> bytes:
    """Return `num_bytes` zeros (a multiple of a MiB), compressed twice with gzip."""
    checksum, zeros = 0, bytes(MIB)
    for _ in range(num_bytes // MIB):
        checksum = zlib.crc32(zeros, checksum)
    once = bytes([31, 139, 8, *[0] * 7]) + deflated(num_bytes) + struct.pack("<II", checksum, num_bytes)
    return gzip.compress(once)


def brotlied(num_bytes: int) -> bytes:
    """Return `num_bytes` zeros, compressed with brotli."""
    made, zeros = brotli.Compressor(quality=5), bytes(MIB)
    return b"".join([*(made.process(zeros) for _ in range(num_bytes // MIB)), made.finish()])
