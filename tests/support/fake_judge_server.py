"""A strict OpenAI-compatible judge server on loopback, and a judge that uses it.

The openai package's own types decide which requests are valid.
"""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from pydantic import ConfigDict, TypeAdapter, with_config

from megatron_rl.config import JudgeSettings
from megatron_rl.rewards.judge import Judge
from megatron_rl.rewards.judge_prompt import load_judge_prompt

PROMPT = load_judge_prompt("answer_equivalence", examples="general")
_BODY = TypeAdapter(with_config(ConfigDict(extra="forbid"))(CompletionCreateParamsNonStreaming))


@dataclass(slots=True)
class JudgeReply:
    body: str | bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    delay_s: float = 0.0
    drop_connection: bool = False
    """Close the connection without a response."""
    num_repeats: int = 1
    """Number of times the body is sent. If the headers contain Transfer-Encoding, it is sent in
    chunks without a length.
    """


def make_completion(text: str) -> JudgeReply:
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    return JudgeReply(json.dumps({"id": "1", "object": "chat.completion", "created": 1, "model": "judge", "choices": [choice]}))


@dataclass(slots=True)
class JudgeServer:
    url: str
    respond: Callable[[dict], JudgeReply]
    """Computes the response to the body of a request."""
    models_reply: JudgeReply | None = None
    """Response to a request for the models, if it differs from the list of `models`."""
    models: tuple[str, ...] = ("served", "judge", "other")
    bodies: list[dict] = field(default_factory=list)
    request_times: list[float] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    in_flight: int = 0
    max_in_flight: int = 0
    """Largest number of concurrent requests."""


@contextmanager
def serve_judge(respond: Callable[[dict], JudgeReply]) -> Iterator[JudgeServer]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            assert self.path == "/v1/models", self.path
            if server.models_reply is not None:
                time.sleep(server.models_reply.delay_s)
                self.send(server.models_reply)
                return
            models = [{"id": name, "object": "model", "created": 1, "owned_by": "me"} for name in server.models]
            self.send(JudgeReply(json.dumps({"object": "list", "data": models})))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                server.bodies.append(body)
                server.request_times.append(time.monotonic())
                server.keys.add(self.headers["Authorization"])
                server.in_flight += 1
                server.max_in_flight = max(server.max_in_flight, server.in_flight)
            assert self.path == "/v1/chat/completions", self.path
            _BODY.validate_python(body)
            reply = server.respond(body)
            time.sleep(reply.delay_s)
            with lock:
                server.in_flight -= 1
            self.send(reply)

        def send(self, reply: JudgeReply) -> None:
            if reply.drop_connection:
                self.close_connection = True
                return
            content = reply.body.encode() if isinstance(reply.body, str) else reply.body
            chunked = "Transfer-Encoding" in reply.headers
            framing = {} if chunked else {"Content-Length": str(len(content) * reply.num_repeats)}
            piece = b"%x\r\n%b\r\n" % (len(content), content) if chunked else content
            try:
                self.send_response(reply.status)
                for name, value in {**reply.headers, **framing}.items():
                    self.send_header(name, value)
                self.end_headers()
                for _ in range(reply.num_repeats):
                    self.wfile.write(piece)
                self.wfile.write(b"0\r\n\r\n" if chunked else b"")
            except (BrokenPipeError, ConnectionResetError):  # the client gave up, as some tests intend
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    class Http(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128  # with the default of 5, connections wait a second for the kernel's second attempt

    http = Http(("127.0.0.1", 0), Handler)
    server = JudgeServer(f"http://127.0.0.1:{http.server_port}/v1", respond)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.socket.close()


def prompt_fields(answer: str = "crimson") -> dict[str, str]:
    return {"question": "What color?", "reference": "red", "answer": answer}


def answer_correct(_: dict) -> JudgeReply:
    return make_completion('{"correct": true}')


def run_judge(settings: JudgeSettings, client_fn: Callable[[Judge], Awaitable[None]]) -> Judge:
    """Use a judge with short retry delays in its own event loop, then close it."""
    judge = Judge(settings, backoff_s=0.01)

    async def main() -> None:
        await judge.start()
        try:
            await client_fn(judge)
        finally:
            await judge.close()

    asyncio.run(main())
    return judge


def make_judge_settings(*servers: JudgeServer, **changes: object) -> JudgeSettings:
    return JudgeSettings(**{"urls": [server.url for server in servers], "model": "judge", "timeout_s": 5.0, "max_attempts": 3, **changes})
