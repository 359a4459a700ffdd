"""A real HTTP server in a thread that stands in for another service.

One function computes the responses.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

AnswerFn = Callable[[str, dict], tuple[int, object] | None]
"""Maps a path and a JSON body ({} if there is none) to a status and a response. Bytes are sent
unchanged, and the parts of an iterator are sent as they come. None closes the connection.
"""


def start_server(answer: AnswerFn) -> ThreadingHTTPServer:
    """Start a server on a free port; it runs until it is stopped."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            answered = answer(self.path, json.loads(self.rfile.read(length)) if length else {})
            if answered is None:
                self.close_connection = True
                return
            status, said = answered
            self.send_response(status)
            if isinstance(said, Iterator):
                self.send_header("Content-Length", "100000")
                self.end_headers()
                with suppress(OSError):
                    self.wfile.writelines(said)
                self.close_connection = True
                return
            body = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *given: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


def server_url(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def stop_server(server: ThreadingHTTPServer) -> None:
    server.shutdown()
    server.server_close()
