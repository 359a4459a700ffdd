"""A real HTTP server in a thread, in the place of somebody's: one function answers."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

AnswerFn = Callable[[str, dict], tuple[int, object] | None]
"""From a path and a body, {} where there is none, to a status and what is said, bytes as they are; None breaks the connection off. Of what
is said by an iterator each part is sent when it comes."""


def start_server(answer: AnswerFn) -> ThreadingHTTPServer:
    """At a free port, until it is stopped."""

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
            """It keeps silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


def server_url(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def stop_server(server: ThreadingHTTPServer) -> None:
    server.shutdown()
    server.server_close()
