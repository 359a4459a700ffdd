"""HTTP server of OpenAI's chat completions, which samples from the policy.

In a run, every episode has a key of its own. A request with this key becomes a turn of the episode.
A second key posts the episode's reward. The server runs in the event loop of the episodes; while a
colocated engine is paused, requests wait. After training, the same server answers requests without
episodes (inference.py).
"""

import asyncio
import json
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect

from megatron_rl.tasks.agent.chat_request import IGNORE_SETTING, MAX_IMAGES, MODEL, ChatRequest, ChatResponse, RequestError, parse_request
from megatron_rl_sandbox.access import RequestRejection
from megatron_rl_sandbox.connections import ConnectionRegistry
from megatron_rl_sandbox.http import LISTEN_BACKLOG, NO_DOC_PAGES, SignalFreeServer, make_uvicorn_config, run_while_connected
from megatron_rl_sandbox.request_gate import RETRY_HEADERS, RequestGuardMiddleware

MAX_BODY_BYTES = 64 << 20
"""Maximum size of a request, which contains the images of the whole conversation."""
MAX_DELIMITERS = 1 << 20
CLIENT_CLOSED = 499
"""Status that is logged if the client has disconnected before its response."""
HISTORY_HEADER, IGNORED_HEADER = "X-History", "X-Ignored"
"""Headers of a response: how the tokens of the prompt were obtained (inference.py), and the
settings of the request that had no effect.
"""
REJECTION_CODES = {401: "invalid_api_key", 413: "request_too_large"}
"""Codes of OpenAI's error object, by the status of requests that the middleware rejects."""


AskFn = Callable[[ChatRequest, str], Awaitable[list[ChatResponse]]]
"""Takes a request and its idempotency key ("" without one), and returns the policy's responses, one
per choice. Raises RequestError if the episode accepts no more requests.
"""
RewardFn = Callable[[float], None]
"""Takes the reward that was posted for an episode."""


@dataclass(slots=True, frozen=True, kw_only=True)
class OpenAccess:
    """Access to the policy without the key of an episode."""

    ask: AskFn
    """Answers the requests."""
    token: str = ""
    """Key that requests need; empty for none."""
    models: Sequence[str] = (MODEL,)
    """Names of the model; requests for others are rejected."""
    max_requests: int = 256
    """Maximum number of requests in progress; further requests are rejected with status 429."""
    max_images: int = MAX_IMAGES
    """Maximum number of images in a request."""
    ignore_setting: str = IGNORE_SETTING
    """Setting that ignores an unsupported setting of requests, as for `parse_request`."""


class PostedReward(BaseModel):
    """Body of a request that posts a reward."""

    model_config = ConfigDict(extra="forbid")
    reward: float = Field(allow_inf_nan=False, strict=True)


class ChatServer:
    """Server for the episodes of a task, or for everybody who has the key of an `OpenAccess`."""

    def __init__(self, *, host: str = "127.0.0.1", ignored: Sequence[str] = (), access: OpenAccess | None = None) -> None:
        """Create the server.

        Args:
            host: Address to listen on.
            ignored: Unsupported settings of requests that are ignored.
            access: Access without an episode; None if every request needs the key of an episode.
        """
        self.base_url = ""
        """Address for OPENAI_BASE_URL; set by `start`."""
        self._host, self._ignored, self._access = host, ignored, access
        self._num_requests = 0
        self._episodes: dict[str, AskFn] = {}
        """Maps the key of each running episode to its function."""
        self._rewards: dict[str, RewardFn] = {}
        """Maps the reward key of each running episode to its function."""
        self._server: SignalFreeServer | None = None
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

    def make_app(self) -> FastAPI:
        """Return the application with its routes and limits."""
        app = FastAPI(**NO_DOC_PAGES)
        app.add_middleware(
            RequestGuardMiddleware, max_body_bytes={"completions": MAX_BODY_BYTES}, max_delimiters=MAX_DELIMITERS,
            token=self._access.token if self._access else "", hosts=(self._host,), make_body=_make_rejection,
        )  # fmt: skip
        app.post("/v1/chat/completions", response_model=None)(self._complete)
        app.get("/v1/models", response_model=None)(self._list_models)
        app.post("/v1/rewards", response_model=None)(self._post_reward)
        return app

    async def start(self) -> None:
        """Start the server on a free port."""
        app = self.make_app()
        listener = socket.create_server((self._host, 0), backlog=LISTEN_BACKLOG)
        self._server = SignalFreeServer(make_uvicorn_config(app, ConnectionRegistry()))
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
        self._num_requests += 1
        try:
            ask = self._find_episode(request)
            asked = await self._parse(await request.body())
            answers = await run_while_connected(request, ask(asked, request.headers.get("idempotency-key", "")[:200]))
        except RequestError as error:
            headers = RETRY_HEADERS if error.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE) else {}
            return JSONResponse(error.to_json(), error.status, headers=headers)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)
        finally:
            self._num_requests -= 1
        reported = {HISTORY_HEADER: answers[0].history, IGNORED_HEADER: " ".join(answers[0].ignored)}
        headers = {name: text for name, text in reported.items() if text}
        if asked.is_streamed:
            return Response(_make_stream(answers, has_usage=asked.has_usage_chunk), media_type="text/event-stream", headers=headers)
        return JSONResponse(_make_completion(answers), headers=headers)

    async def _parse(self, body: bytes) -> ChatRequest:
        access = self._access
        if access is None:
            return await asyncio.to_thread(parse_request, body, ignored=self._ignored)
        if self._num_requests > access.max_requests:
            text = f"{access.max_requests} requests are in progress already; try again later"
            raise RequestError(text, code="rate_limit_exceeded", status=HTTPStatus.TOO_MANY_REQUESTS)
        asked = await asyncio.to_thread(
            parse_request, body, ignored=self._ignored, max_images=access.max_images, ignore_setting=access.ignore_setting
        )
        if asked.model not in access.models:
            text = (
                f"model: {asked.model[:60]!r} is not served here; use {' or '.join(access.models)}, or start the server with --model-name"
            )
            raise RequestError(text, param="model", code="model_not_found", status=HTTPStatus.NOT_FOUND)
        return asked

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
        names = self._access.models if self._access else (MODEL,)
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "megatron_rl"} for name in names]
        return JSONResponse({"object": "list", "data": models})

    def _find_episode(self, request: Request) -> AskFn:
        ask = self._episodes.get(_read_key(request), self._access.ask if self._access else None)
        if ask is None:
            raise RequestError("this key belongs to no running episode; use OPENAI_API_KEY", code="invalid_api_key", status=401)
        return ask


def _read_key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _make_rejection(rejection: RequestRejection) -> object:
    code = REJECTION_CODES.get(rejection.status_code, "invalid_request")
    return RequestError(rejection.detail, code=code, status=rejection.status_code).to_json()


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
