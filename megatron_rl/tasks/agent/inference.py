"""Endpoint of a trained policy: the requests of agents, without episodes.

Prompts have the token ids that they have in training. A request that continues a conversation
continues the tokens of its last response as they were sampled (session_store.py), and only the
messages after it are tokenized; other requests are new prompts. Tool calls, choices, stop strings
and errors are those of the server of a run. A request may set temperature, seed and maximum length.
The policy is sampled from its whole distribution, as in training.
"""

import asyncio
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field, ValidationError

from megatron_rl.config.serve import ServeSettings
from megatron_rl.errors import InfraError
from megatron_rl.rollout.engine import Completion, InferenceEngine, ResponseSize, SamplingSettings
from megatron_rl.rollout.transcript_segments import extract_images
from megatron_rl.tasks.agent.chat_request import MODEL, ChatRequest, ChatResponse, RequestError
from megatron_rl.tasks.agent.chat_server import ChatServer, OpenAccess
from megatron_rl.tasks.agent.environment import response_forms
from megatron_rl.tasks.agent.session_store import FoundSession, SessionStore
from megatron_rl.types import Message, StopReason, TokenSequence
from megatron_rl_sandbox.connections import ConnectionRegistry
from megatron_rl_sandbox.http import reserve_connections, serve_until_signal

if TYPE_CHECKING:  # import torch
    from megatron_rl.rollout.conversation import SequenceLimits
    from megatron_rl.rollout.renderer import Renderer

FOLLOWED = {"temperature", "seed", "max_tokens", "max_completion_tokens", "model"}
"""Settings of a request that a run replaces, and that this endpoint follows."""
MAX_SEED = (1 << 31) - 1
SEED_STRIDE = 0x9E3779B1
"""Difference between the seeds of two choices of a request, modulo MAX_SEED + 1."""
EXTRA_FILES = 128
"""Number of file descriptors that are reserved for the engine, threads and the log."""
CONTINUED, NEW, DROPPED = "continued", "new", "dropped"
"""Sources of a prompt's tokens: those of a remembered session continued; a new prompt;
rendered from its messages, because the session that it continues was dropped.
"""
ReportFn = Callable[[str], None]
"""Takes one line for the user."""
LogFn = Callable[[Mapping[str, object]], None]
"""Takes the record of one request."""


class RequestSampling(BaseModel):
    """Settings of a request that the endpoint follows."""

    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    seed: int | None = None


def read_sampling(asked: ChatRequest, *, temperature: float, max_tokens: int) -> SamplingSettings:
    """Return the sampling settings of a request, with defaults for those that it leaves out.

    Raises:
        RequestError: A setting is invalid.
    """
    try:
        given = RequestSampling.model_validate(asked.settings)
    except ValidationError as error:
        mistake = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = ".".join(map(str, mistake["loc"]))
        raise RequestError(f"{param}: {mistake['msg'][:200]}", param=param, code="invalid_value") from error
    seed = secrets.randbits(31) if given.seed is None else given.seed & MAX_SEED
    return SamplingSettings(
        max_tokens=given.max_completion_tokens or given.max_tokens or max_tokens,
        temperature=temperature if given.temperature is None else given.temperature, seed=seed, stop=asked.stop,
    )  # fmt: skip


class PolicyEndpoint:
    """Samples the responses to requests."""

    def __init__(
        self, engine: InferenceEngine, renderer: "Renderer", settings: ServeSettings, *,
        limits: "SequenceLimits", max_new_tokens: int, report: ReportFn, log: LogFn | None = None, stop: Callable[[], None],
    ) -> None:  # fmt: skip
        """Create the endpoint.

        Args:
            engine: Engine with the weights of the policy.
            renderer: Renderer of the model.
            settings: Settings with a temperature.
            limits: Limits of a sequence.
            max_new_tokens: Maximum number of tokens in a response of a request without a limit.
            report: Receives lines for the user.
            log: Receives a record of each request.
            stop: Called if the engine has failed.
        """
        assert settings.temperature is not None
        self._engine, self._renderer, self._settings, self._limits = engine, renderer, settings, limits
        self._temperature, self._max_new_tokens = settings.temperature, max_new_tokens
        self._report, self._log, self._stop = report, log, stop
        self.sessions = SessionStore(max_sessions=settings.max_sessions)
        self.counts: Counter[str] = Counter()
        """Number of answered requests by how the tokens of their prompts were obtained."""
        self.failure: InfraError | None = None
        """Error of the engine."""
        self._reported: set[str] = set()

    async def ask(self, asked: ChatRequest, idempotency_key: str) -> list[ChatResponse]:
        """Return the policy's responses, one per choice. `idempotency_key` is not used.

        Raises:
            RequestError: The request is invalid or too long, or the engine has failed.
        """
        sampling = read_sampling(asked, temperature=self._temperature, max_tokens=self._max_new_tokens)
        limit_s = self._settings.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._respond(asked, sampling)
        except TimeoutError as error:
            raise RequestError(f"the request took more than {limit_s:g} s (--timeout)", code="timeout", status=503) from error
        except InfraError as error:
            self.failure = error
            self._stop()
            raise RequestError(str(error), code="engine_error", status=503) from error

    async def _respond(self, asked: ChatRequest, sampling: SamplingSettings) -> list[ChatResponse]:
        found = self.sessions.find(asked.keys)
        messages = found.session.tree.restore_texts(asked.messages, asked.keys)
        try:
            prompt = await self._renderer.run_in_thread(partial(self._render, messages, found))
        except ValueError as error:
            raise RequestError(str(error), param="messages", code="invalid_value") from error
        self._check_size(prompt)
        size = len(prompt.token_ids)
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, self._limits.max_sequence_tokens - size))
        try:
            completions = await self._sample(prompt, sampling, num=asked.num_choices)
        except ValueError as error:
            raise RequestError(str(error), code="invalid_value") from error
        history = DROPPED if found.is_dropped else NEW if found.continuation.turn is None else CONTINUED
        num_known = 0 if found.continuation.turn is None else len(found.session.read_tokens(found.continuation.turn))
        ignored = tuple(name for name in asked.replaced if name not in FOLLOWED)
        responses, records = [], []
        for completion in completions:
            text = self._renderer.decode_response(completion.token_ids)
            forms = response_forms(text, asked)
            added = [*prompt.token_ids[num_known:], *completion.token_ids]
            self.sessions.add(found, asked.keys, added, text=text, forms=forms)
            size_of = ResponseSize(size, len(completion.token_ids), completion.is_stopped)
            responses.append(ChatResponse(forms[0].content, forms[0].calls, size_of, history, ignored))
            records.append({"token_ids": completion.token_ids, "logprobs": completion.logprobs, "text": text})
        self._count(history, ignored)
        if self._log is not None:
            images = [image.key for image in prompt.images]
            self._log({"history": history, "prompt_token_ids": prompt.token_ids, "images": images, "responses": records})
        return responses

    def _render(self, messages: Sequence[Message], found: FoundSession) -> TokenSequence:
        """Return the prompt of a request.

        The images of the continued turn are those of the messages that lead to it, so only its
        tokens are remembered.
        """
        turn, num_known = found.continuation.turn, found.continuation.num_known
        if turn is None:
            return self._renderer.prompt(messages)
        context = TokenSequence()
        images = tuple(self._renderer.image(picture) for picture in extract_images(messages[:num_known]))
        context.extend(found.session.read_tokens(turn), images=images)
        more = self._renderer.observation(context, messages[num_known:])
        context.extend(more.token_ids, images=tuple(more.images))
        return context

    def _check_size(self, prompt: TokenSequence) -> None:
        end = self._limits.exceeds(TokenSequence(), prompt)
        if end is None:
            return
        limit, option = {
            StopReason.MAX_TOKENS: (f"{self._limits.max_sequence_tokens} tokens with its response", "--max-model-len"),
            StopReason.MAX_IMAGES: (f"{self._limits.max_images} images", "--max-images"),
            StopReason.MAX_PIXELS: (f"{self._limits.max_pixels} pixels after the resize", "task.max_pixels of the run"),
        }[end]
        size = f"{len(prompt.token_ids)} tokens and {len(prompt.images)} images"
        text = f"messages: the prompt has {size}; a sequence may have at most {limit} ({option})"
        raise RequestError(text, param="messages", code="context_length_exceeded")

    async def _sample(self, prompt: TokenSequence, sampling: SamplingSettings, *, num: int) -> list[Completion]:
        each = [replace(sampling, seed=(sampling.seed + SEED_STRIDE * number) & MAX_SEED) for number in range(num)]
        tasks = [asyncio.create_task(self._engine.generate(prompt.token_ids, prompt.images, own)) for own in each]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # if one failed or the client is gone, cancel the others
                task.cancel()

    def _count(self, history: str, ignored: Sequence[str]) -> None:
        self.counts[history] += 1
        num = self.counts[DROPPED]
        if history == DROPPED and num & (num - 1) == 0:  # 1, 2, 4, 8, ...
            self._report(
                f"{num} requests were rendered from their messages, because the sessions that they continue had been dropped; "
                f"--max-sessions={self._settings.max_sessions} can be raised"
            )
        for name in ignored:
            if name not in self._reported:
                self._reported.add(name)
                self._report(f"{name} in a request has no effect: the policy is sampled as in training")

    def describe(self) -> str:
        """Return the number of answered requests in one line."""
        kinds = {CONTINUED: "continued a session", NEW: "new prompts", DROPPED: "continued a dropped session"}
        words = [f"{self.counts[kind]} {name}" for kind, name in kinds.items() if self.counts[kind]]
        return f"{self.counts.total()} requests answered" + (f": {', '.join(words)}" if words else "")


async def serve_endpoint(
    endpoint: PolicyEndpoint, settings: ServeSettings, *, listener: socket.socket, token: str, max_images: int
) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        InfraError: The engine has failed.
    """
    access = OpenAccess(
        ask=endpoint.ask, token=token, models=(MODEL, *settings.model_names), max_requests=settings.max_requests,
        max_images=max_images, ignore_setting="--ignore {name}",
    )  # fmt: skip
    server = ChatServer(host=settings.host, ignored=settings.ignore, access=access)
    most = reserve_connections(EXTRA_FILES, max_connections=ConnectionRegistry().max_connections)
    await serve_until_signal(server.make_app(), listener, registry=ConnectionRegistry(max_connections=most), path="/v1")
    if endpoint.failure is not None:
        raise endpoint.failure
