"""HTTP server of OpenAI's chat completions, which samples from the policy of the run.

Every episode has a key of its own. A request with this key becomes a turn of the episode. A second
key posts the episode's reward. The server runs in the event loop of the episodes; while a colocated
engine is paused, requests wait.
"""

import asyncio
import json
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
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


AskFn = Callable[[ChatRequest, str], Awaitable[list[ChatResponse]]]
"""Takes a request and its idempotency key ("" without one), and returns the policy's responses, one
per choice. Raises RequestError if the episode accepts no more requests.
"""
RewardFn = Callable[[float], None]
"""Takes the reward that was posted for an episode."""


class _Server(uvicorn.Server):
    """Server that leaves signals to the run."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


class PostedReward(BaseModel):
    """Body of a request that posts a reward."""

    model_config = ConfigDict(extra="forbid")
    reward: float = Field(allow_inf_nan=False, strict=True)


class ChatServer:
    """Server for the episodes of a task."""

    def __init__(self, *, host: str = "127.0.0.1", ignored: Sequence[str] = ()) -> None:
        """Create the server.

        Args:
            host: Address to listen on.
            ignored: Unsupported settings of requests that are ignored.
        """
        self.base_url = ""
        """Address for OPENAI_BASE_URL; set by `start`."""
        self._host, self._ignored = host, ignored
        self._episodes: dict[str, AskFn] = {}
        """Maps the key of each running episode to its function."""
        self._rewards: dict[str, RewardFn] = {}
        """Maps the reward key of each running episode to its function."""
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def open_episode(self, ask: AskFn) -> str:
        """Return a new key. Requests with this key are passed to `ask`."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._episodes[key] = ask
        return key

    def open_reward(self, post: RewardFn) -> str:
        """Return a new key with which rewards can be posted, but no responses requested."""
        key = f"rk-{secrets.token_urlsafe(32)}"
        self._rewards[key] = post
        return key

    def close_episode(self, *keys: str) -> None:
        """Reject further requests with these keys."""
        for key in keys:
            self._episodes.pop(key, None)
            self._rewards.pop(key, None)

    async def start(self) -> None:
        """Start the server on a free port."""
        app = FastAPI(**NO_DOC_PAGES)
        limits = {"max_body_bytes": {"completions": MAX_BODY_BYTES}, "max_delimiters": MAX_DELIMITERS}
        app.add_middleware(RequestGuardMiddleware, **limits, token="", hosts=(self._host,))
        app.post("/v1/chat/completions", response_model=None)(self._complete)
        app.get("/v1/models", response_model=None)(self._list_models)
        app.post("/v1/rewards", response_model=None)(self._post_reward)
        listener = socket.create_server((self._host, 0), backlog=LISTEN_BACKLOG)
        self._server = _Server(make_uvicorn_config(app, ConnectionRegistry()))
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.01)
        self.base_url = f"http://{self._host}:{listener.getsockname()[1]}/v1"

    async def close(self) -> None:
        """Stop the server. Requests of running episodes are ended after a few seconds."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
        self._server = self._serving = None

    async def _complete(self, request: Request) -> Response:
        try:
            ask = self._find_episode(request)
            asked = await asyncio.to_thread(parse_request, await request.body(), ignored=self._ignored)
            answers = await run_while_connected(request, ask(asked, request.headers.get("idempotency-key", "")[:200]))
        except RequestError as error:
            return JSONResponse(error.to_json(), error.status)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)
        if asked.is_streamed:
            return Response(_make_stream(answers, has_usage=asked.has_usage_chunk), media_type="text/event-stream")
        return JSONResponse(_make_completion(answers))

    async def _post_reward(self, request: Request) -> Response:
        """Record the reward of an episode; a later reward replaces it."""
        post = self._rewards.get(_read_key(request))
        if post is None:
            error = RequestError("this key posts no rewards; use MEGATRON_RL_REWARD_KEY", code="invalid_api_key", status=401)
            return JSONResponse(error.to_json(), error.status)
        try:
            post(PostedReward.model_validate_json(await request.body()).reward)
        except ValidationError:
            error = RequestError('the body must be {"reward": a finite number}', param="reward", code="invalid_value")
            return JSONResponse(error.to_json(), error.status)
        return JSONResponse({"object": "reward"})

    async def _list_models(self, request: Request) -> Response:
        try:
            self._find_episode(request)
        except RequestError as error:
            return JSONResponse(error.to_json(), error.status)
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron_rl"}]})

    def _find_episode(self, request: Request) -> AskFn:
        ask = self._episodes.get(_read_key(request))
        if ask is None:
            raise RequestError("this key belongs to no running episode; use OPENAI_API_KEY", code="invalid_api_key", status=401)
        return ask


def _read_key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _make_completion(answers: Sequence[ChatResponse]) -> dict[str, object]:
    choices = [
        {"index": index, "message": _make_message(answer), "logprobs": None, "finish_reason": _finish_reason(answer)}
        for index, answer in enumerate(answers)
    ]
    return {**_header("chat.completion"), "choices": choices, "usage": _usage(answers)}


def _make_message(answer: ChatResponse) -> dict[str, object]:
    calls = _make_calls(answer)
    content = answer.content or (None if calls else "")
    return {"role": "assistant", "content": content, "refusal": None, **({"tool_calls": calls} if calls else {})}


def _make_calls(answer: ChatResponse) -> list[dict[str, object]]:
    return [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in answer.calls
    ]


def _make_stream(answers: Sequence[ChatResponse], *, has_usage: bool) -> str:
    """Return the events of a streamed response. The text is one chunk, because it is complete."""
    header = _header("chat.completion.chunk")
    chunks: list[dict[str, object]] = []
    for index, answer in enumerate(answers):
        calls = [{"index": number, **call} for number, call in enumerate(_make_calls(answer))]
        deltas: list[dict[str, object]] = [{"role": "assistant", "content": ""}]
        if answer.content:
            deltas.append({"content": answer.content})
        if calls:
            deltas.append({"tool_calls": calls})
        choices = [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
        choices.append({"index": index, "delta": {}, "logprobs": None, "finish_reason": _finish_reason(answer)})
        chunks += [{**header, "choices": [choice]} for choice in choices]
    if has_usage:
        chunks.append({**header, "choices": [], "usage": _usage(answers)})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def _header(kind: str) -> dict[str, object]:
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": MODEL}


def _finish_reason(answer: ChatResponse) -> str:
    if answer.calls:
        return "tool_calls"
    return "stop" if answer.size is None or answer.size.is_stopped else "length"


def _usage(answers: Sequence[ChatResponse]) -> dict[str, int] | None:
    sizes = [answer.size for answer in answers if answer.size is not None]
    if len(sizes) < len(answers):
        return None
    prompt, sampled = sizes[0].num_prompt_tokens, sum(size.num_tokens for size in sizes)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
