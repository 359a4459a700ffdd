"""A real server on a free port that misbehaves in one way in response to every request."""

import socket
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PAUSE_S = 0.02
"""Seconds between two parts of a slow response; far below every read timeout."""


def _packed(num_bytes: int) -> bytes:
    made = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join([made.compress(bytes(num_bytes)), made.flush()])


_PACKED = _packed(8 << 20)
FIRST_BYTES = {
    "body by drops": b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n",
    "head by drops": b"HTTP/1.1 200 OK\r\n",
    "silent": b"",
    "echo": b"a-word-of-letters\r\n\r\n",
    "endless": b"HTTP/1.1 200 OK\r\n\r\n",
    "long error": b"HTTP/1.1 500 Oops\r\n\r\n",
    "packed": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s" % (len(_PACKED), _PACKED),
    "packed twice": b"HTTP/1.1 200 OK\r\nContent-Encoding: identity, gzip\r\nContent-Length: 2\r\n\r\n{}",
    "401": b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 11\r\n\r\nno such key",
    "403": b"HTTP/1.1 403 Forbidden\r\nContent-Length: 11\r\n\r\nno such key",
}
"""First bytes of the response, by the name of the behavior."""
ENDLESS_BYTES = {"body by drops": b" ", "head by drops": b"X-A: 1\r\n", "endless": b"a" * (1 << 16), "long error": b"a" * (1 << 16)}
"""Bytes that are repeated without end after the first ones."""


@contextmanager
def serve_hostile(behavior: str, *, redirect_url: str = "") -> Iterator[str]:
    """Start the server and yield its address.

    Behaviors are those of FIRST_BYTES and `redirect`, which redirects to `redirect_url`.
    """
    trap, is_over = socket.create_server(("127.0.0.1", 0)), threading.Event()
    heads = FIRST_BYTES | {"redirect": f"HTTP/1.1 302 Found\r\nLocation: {redirect_url}\r\nContent-Length: 0\r\n\r\n".encode()}

    def serve(line: socket.socket) -> None:
        with line, suppress(OSError):
            while line.recv(1 << 16) and not is_over.is_set():
                line.sendall(heads[behavior])
                while behavior in ENDLESS_BYTES and not is_over.is_set():
                    line.sendall(ENDLESS_BYTES[behavior])
                    time.sleep(0.0 if len(ENDLESS_BYTES[behavior]) > 100 else PAUSE_S)

    def listen() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(trap.accept()[0],), daemon=True).start()

    threading.Thread(target=listen, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{trap.getsockname()[1]}"
    finally:
        is_over.set()
        trap.close()
