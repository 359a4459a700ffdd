"""TCP proxies to servers that can be closed and reopened, so that clients find a server unreachable
in between.
"""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from urllib.parse import urlsplit

HOST = "127.0.0.1"


class TcpProxy:
    """A proxy at `url` to a server at another address."""

    def __init__(self, target: str) -> None:
        self._target, self._port = (urlsplit(target).hostname, urlsplit(target).port), 0
        self._open: list[socket.socket] = []
        self.reopen()
        self.url = f"http://{HOST}:{self._port}"

    def reopen(self) -> None:
        self._entry = socket.create_server((HOST, self._port), backlog=64)
        self._port = self._entry.getsockname()[1]
        Thread(target=self._serve, args=(self._entry,), daemon=True).start()

    def close(self) -> None:
        """Break all connections and accept no new ones."""
        self._entry.shutdown(socket.SHUT_RDWR)
        self._entry.close()
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _serve(self, entry: socket.socket) -> None:
        while True:
            try:
                near, _ = entry.accept()
            except OSError:  # the proxy is closed
                return
            far = socket.create_connection(self._target)
            self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                Thread(target=_forward, args=(source, sink), daemon=True).start()


def _forward(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while part := source.recv(1 << 16):
            sink.sendall(part)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@contextmanager
def open_proxies(urls: Sequence[str]) -> Iterator[list[TcpProxy]]:
    made = [TcpProxy(url) for url in urls]
    try:
        yield made
    finally:
        for way in made:
            with suppress(OSError):
                way.close()
