"""A strict OpenAI-compatible server on loopback (requests must be what the openai package itself calls valid), and a judge that asks it."""

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
class Reply:
    body: str | bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    hang_s: float = 0.0
    drop: bool = False
    """Close the connection without a word."""
    times: int = 1
    """The body is sent so often; in pieces without a length where the headers say Transfer-Encoding."""


def completion(text: str) -> Reply:
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    return Reply(json.dumps({"id": "1", "object": "chat.completion", "created": 1, "model": "judge", "choices": [choice]}))


@dataclass(slots=True)
class Server:
    url: str
    behave: Callable[[dict], Reply]
    """What to answer to a request's body."""
    greeting: Reply | None = None
    """What to answer to a question for the models, if not these."""
    models: tuple[str, ...] = ("served", "judge", "other")
    bodies: list[dict] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    in_flight: int = 0
    most: int = 0
    """Requests that were under way at once."""


@contextmanager
def serving(behave: Callable[[dict], Reply]) -> Iterator[Server]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            assert self.path == "/v1/models", self.path
            if server.greeting is not None:
                time.sleep(server.greeting.hang_s)
                self.send(server.greeting)
                return
            models = [{"id": name, "object": "model", "created": 1, "owned_by": "me"} for name in server.models]
            self.send(Reply(json.dumps({"object": "list", "data": models})))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                server.bodies.append(body)
                server.times.append(time.monotonic())
                server.keys.add(self.headers["Authorization"])
                server.in_flight += 1
                server.most = max(server.most, server.in_flight)
            assert self.path == "/v1/chat/completions", self.path
            _BODY.validate_python(body)
            reply = server.behave(body)
            time.sleep(reply.hang_s)
            with lock:
                server.in_flight -= 1
            self.send(reply)

        def send(self, reply: Reply) -> None:
            if reply.drop:
                self.close_connection = True
                return
            content = reply.body.encode() if isinstance(reply.body, str) else reply.body
            chunked = "Transfer-Encoding" in reply.headers
            framing = {} if chunked else {"Content-Length": str(len(content) * reply.times)}
            piece = b"%x\r\n%b\r\n" % (len(content), content) if chunked else content
            try:
                self.send_response(reply.status)
                for name, value in {**reply.headers, **framing}.items():
                    self.send_header(name, value)
                self.end_headers()
                for _ in range(reply.times):
                    self.wfile.write(piece)
                self.wfile.write(b"0\r\n\r\n" if chunked else b"")
            except (BrokenPipeError, ConnectionResetError):  # the client gave up, which some tests want
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    class Http(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128  # with the usual 5 many connections at once wait a second for the kernel's second attempt

    http = Http(("127.0.0.1", 0), Handler)
    server = Server(f"http://127.0.0.1:{http.server_port}/v1", behave)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.socket.close()


def fields(answer: str = "crimson") -> dict[str, str]:
    return {"question": "What color?", "reference": "red", "answer": answer}


def right(_: dict) -> Reply:
    return completion('{"correct": true}')


def held(settings: JudgeSettings, use: Callable[[Judge], Awaitable[None]]) -> Judge:
    """A judge used in an event loop of its own, then closed. Its rests are short."""
    judge = Judge(settings, backoff_s=0.01)

    async def main() -> None:
        await judge.start()
        try:
            await use(judge)
        finally:
            await judge.close()

    asyncio.run(main())
    return judge


def settings(*servers: Server, **changes: object) -> JudgeSettings:
    return JudgeSettings(**{"urls": [server.url for server in servers], "model": "judge", "timeout_s": 5.0, "max_attempts": 3, **changes})
