"""HTTP server of OpenAI's chat completions, which samples from the policy of the run.

Every episode has a key of its own. A request with this key becomes a turn of the episode. The
server runs in the event loop of the episodes; while a colocated engine is paused, requests wait. It
listens on a loopback address.
"""

import asyncio
import json
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from megatron_rl.tasks.agent.chat_request import MODEL, ChatRequest, ChatResponse, RequestError, parse_request
from megatron_rl_sandbox.connections import ConnectionRegistry
from megatron_rl_sandbox.http import LISTEN_BACKLOG, NO_DOC_PAGES, make_uvicorn_config, run_while_connected
from megatron_rl_sandbox.request_gate import RequestGuardMiddleware

MAX_BODY_BYTES = 64 << 20
"""Maximum size of a request, which contains the images of the whole conversation."""
MAX_DELIMITERS = 1 << 20
CLIENT_CLOSED = 499
"""Status that is logged if the client has disconnected before its response."""


AskFn = Callable[[ChatRequest, str], Awaitable[ChatResponse]]
"""Takes a request and its idempotency key ("" without one), and returns the policy's response.
Raises RequestError if the episode accepts no more requests.
"""


class _Server(uvicorn.Server):
    """Server that leaves signals to the run."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


class ChatServer:
    """Server for the episodes of a task."""

    def __init__(self) -> None:
        self.base_url = ""
        """Address for OPENAI_BASE_URL; set by `start`."""
        self._episodes: dict[str, AskFn] = {}
        """Maps the key of each running episode to its function."""
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def open_episode(self, ask: AskFn) -> str:
        """Return a new key. Requests with this key are passed to `ask`."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._episodes[key] = ask
        return key

    def close_episode(self, key: str) -> None:
        """Reject further requests with this key."""
        self._episodes.pop(key, None)

    async def start(self) -> None:
        """Start the server on a free port."""
        app = FastAPI(**NO_DOC_PAGES)
        app.add_middleware(RequestGuardMiddleware, max_body_bytes={"completions": MAX_BODY_BYTES}, max_delimiters=MAX_DELIMITERS, token="")
        app.post("/v1/chat/completions", response_model=None)(self._complete)
        app.get("/v1/models", response_model=None)(self._list_models)
        listener = socket.create_server(("127.0.0.1", 0), backlog=LISTEN_BACKLOG)
        self._server = _Server(make_uvicorn_config(app, ConnectionRegistry()))
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.01)
        self.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"

    async def close(self) -> None:
        """Stop the server. Requests of running episodes are ended after a few seconds."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
        self._server = self._serving = None

    async def _complete(self, request: Request) -> Response:
        try:
            ask = self._find_episode(request)
            asked = await asyncio.to_thread(parse_request, await request.body())
            answer = await run_while_connected(request, ask(asked, request.headers.get("idempotency-key", "")[:200]))
        except RequestError as error:
            return JSONResponse(error.to_json(), error.status)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)
        if asked.is_streamed:
            return Response(_make_stream(answer, has_usage=asked.has_usage_chunk), media_type="text/event-stream")
        return JSONResponse(_make_completion(answer))

    async def _list_models(self, request: Request) -> Response:
        try:
            self._find_episode(request)
        except RequestError as error:
            return JSONResponse(error.to_json(), error.status)
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron_rl"}]})

    def _find_episode(self, request: Request) -> AskFn:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        ask = self._episodes.get(key.strip()) if scheme.lower() == "bearer" else None
        if ask is None:
            raise RequestError("this key belongs to no running episode; use OPENAI_API_KEY", code="invalid_api_key", status=401)
        return ask


def _make_completion(answer: ChatResponse) -> dict[str, object]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": answer.text, "refusal": None},
        "logprobs": None,
        "finish_reason": _finish_reason(answer),
    }
    return {**_header("chat.completion"), "choices": [choice], "usage": _usage(answer)}


def _make_stream(answer: ChatResponse, *, has_usage: bool) -> str:
    """Return the events of a streamed response. The text is one chunk, because it is complete."""
    header = _header("chat.completion.chunk")
    deltas: list[tuple[dict[str, object], str | None]] = [
        ({"role": "assistant", "content": ""}, None), ({"content": answer.text}, None), ({}, _finish_reason(answer)),
    ]  # fmt: skip
    choices = [[{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}] for delta, reason in deltas]
    chunks: list[dict[str, object]] = [{**header, "choices": each} for each in choices]
    if has_usage:
        chunks.append({**header, "choices": [], "usage": _usage(answer)})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def _header(kind: str) -> dict[str, object]:
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": MODEL}


def _finish_reason(answer: ChatResponse) -> str:
    return "stop" if answer.size is None or answer.size.is_stopped else "length"


def _usage(answer: ChatResponse) -> dict[str, int] | None:
    if answer.size is None:
        return None
    prompt, sampled = answer.size.num_prompt_tokens, answer.size.num_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
