"""One call of a server of vLLM for one turn, and what is believed of its answer.

`/inference/v1/generate`: ids out; ids, logprobs and versions back. A picture travels once to each server, then its key stands for it: the
turn that brings one is asked for its first token by itself, and others that show it wait for that.
Read against vLLM 0.32.0: entrypoints/scale_out/token_in_token_out/{protocol,serving}.py.
"""

import asyncio
import base64
import io
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

from pydantic import BaseModel

from megatron_rl.clients.endpoint_pool import EndpointError, describe_error, to_one_line
from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.rollout.vllm.sampler import NUM_SAMPLED_KEY, SEED_KEY
from megatron_rl.rollout.vllm.server_api import VllmServer
from megatron_rl.types import Image
from sandbox.bounded_http import BoundedClient, NoResponse

GENERATE_PATH = "/inference/v1/generate"
MAX_BYTES_PER_TOKEN, MAX_OTHER_BYTES = 1 << 10, 1 << 20
"""Bytes of an answer: of each token, read or sampled, and of all else."""
ABORTED = "abort"
"""Why a turn ended that a server was told to give up, with the tokens that are there."""


class _Logprob(BaseModel):
    logprob: float


class _Logprobs(BaseModel):
    content: list[_Logprob]


class _Span(BaseModel):
    version: str
    start: int
    end: int


class _Choice(BaseModel):
    finish_reason: str
    token_ids: list[int]
    logprobs: _Logprobs | None
    weight_versions: list[_Span] | None


class _Reply(BaseModel):
    prompt_token_ids: list[int]
    choices: list[_Choice]


class _ImageForgotten(EndpointError):
    """It has forgotten a picture."""


@dataclass(slots=True, frozen=True)
class GenerateRequest:
    """What is asked for, whole."""

    token_ids: list[int]
    images: list[Image]
    sampling: SamplingSettings


@dataclass(slots=True, frozen=True)
class PartialCompletion:
    """What a server has sampled of a turn."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """stop, length, or ABORTED."""
    num_from_first_request: int = 0
    """Of them, those that a request before the last has sampled: a stop text that begins there the server has not seen whole."""


@dataclass(slots=True, frozen=True, kw_only=True)
class GenerateClient:
    http: BoundedClient
    image_token_id: int
    stop_ids: list[int]
    limit_s: float
    """Seconds for one request with its whole answer."""
    connect_s: float

    async def generate(
        self, server: VllmServer, request: GenerateRequest, partial_completion: Completion, *, label: str, salt: str
    ) -> PartialCompletion:
        """The rest of a turn of which this much is said, by the weights of this label; `salt` tells prefixes in the server's cache apart.

        EndpointError: no answer, or one that is none; KeyRefused, which is one: the server asks for a key. ValueError: what vLLM does not
        take.
        """
        call = partial(self._send_with_images, server, request, label=label, salt=salt)
        num_said, most = len(partial_completion.token_ids), request.sampling.max_tokens
        if num_said == 0:
            async with _sending_images(server, {image.key for image in request.images}) as brings:
                first = await call([], most=1) if brings else None
            if first is not None:
                if first.finish_reason != "length" or most == 1:
                    return first
                more = await call(first.token_ids, most=most - 1)
                return PartialCompletion(
                    first.token_ids + more.token_ids, first.logprobs + more.logprobs, more.finish_reason, num_from_first_request=1
                )
        return await call(partial_completion.token_ids, most=most - num_said)

    async def _send_with_images(
        self, server: VllmServer, request: GenerateRequest, sampled_ids: list[int], *, most: int, label: str, salt: str
    ) -> PartialCompletion:
        """At most so many tokens more; where the server has forgotten a picture, all of the turn's are sent again."""
        try:
            return await self._call(server, request, sampled_ids, most=most, label=label, salt=salt)
        except _ImageForgotten:
            server.known_images.difference_update(image.key for image in request.images)
            return await self._call(server, request, sampled_ids, most=most, label=label, salt=salt)

    async def _call(
        self, server: VllmServer, request: GenerateRequest, sampled_ids: list[int], *, most: int, label: str, salt: str
    ) -> PartialCompletion:
        asked, began = request.token_ids + sampled_ids, time.monotonic()
        body = {
            "token_ids": self._collapse_image_tokens(asked),
            "content_parts": [await self.image_reference(image, server) for image in request.images] or None,
            "sampling_params": self._sampling_params(request.sampling, len(sampled_ids), most),
            "return_token_ids": True,
            "cache_salt": salt,
        }
        bounds = {
            "timeout_s": self.limit_s,
            "connect_timeout_s": self.connect_s,
            "max_bytes": MAX_OTHER_BYTES + MAX_BYTES_PER_TOKEN * (len(asked) + most),
        }
        try:
            answer = await self.http.request("POST", server.url + GENERATE_PATH, body, **bounds)
        except NoResponse as error:
            server.endpoint.record_failure(sent_at=began)
            raise EndpointError(f"{GENERATE_PATH}: {to_one_line(str(error))}") from error
        if answer.status == HTTPStatus.BAD_REQUEST:
            if request.images and "data is not provided" in answer.text:
                raise _ImageForgotten("has forgotten a picture")
            raise ValueError(to_one_line(answer.text))
        try:
            part = _parse_reply(server.check_reply(answer, GENERATE_PATH), asked, label, max_tokens=most)
        except EndpointError:
            server.endpoint.record_failure(sent_at=began)
            raise
        server.known_images.update(image.key for image in request.images)
        server.endpoint.record_success()
        server.last_sampled_at = time.monotonic()
        return part

    def _sampling_params(self, sampling: SamplingSettings, num_sampled: int, max_tokens: int) -> dict[str, object]:
        return {
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "extra_args": {SEED_KEY: sampling.seed, NUM_SAMPLED_KEY: num_sampled},
            "stop_token_ids": self.stop_ids,
            "ignore_eos": True,
            "logprobs": 0,
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "detokenize": bool(sampling.stop),
        }

    def _collapse_image_tokens(self, token_ids: list[int]) -> list[int]:
        """One placeholder a picture: the server expands them itself."""
        own, before = self.image_token_id, [None, *token_ids[:-1]]
        return [token for token, last in zip(token_ids, before, strict=True) if token != own or last != own]

    async def image_reference(self, image: Image, server: VllmServer) -> dict[str, object]:
        data = None if image.key in server.known_images else await asyncio.to_thread(_data_url, image)
        return {"type": "image_url", "url": data, "uuid": image.key}


@asynccontextmanager
async def _sending_images(server: VllmServer, image_keys: set[str]) -> AsyncIterator[bool]:
    """Whether who shows these pictures brings the server those that it lacks. What others are bringing is waited for first.

    EndpointError: it rests since one of them failed, and this one did not try.
    """
    while unknown := image_keys - server.known_images:
        if not (coming := unknown & server.pending_images.keys()):
            break
        await server.pending_images[coming.pop()].wait()
        if server.endpoint.backoff_until > time.monotonic():
            raise EndpointError("rests: who brought it this turn's picture failed")
    arrived = asyncio.Event()
    server.pending_images.update(dict.fromkeys(unknown, arrived))
    try:
        yield bool(unknown)
    finally:
        for key in unknown:
            del server.pending_images[key]
        arrived.set()


def _parse_reply(body: bytes, sent_ids: list[int], label: str, *, max_tokens: int) -> PartialCompletion:
    """EndpointError: that is no reply of an engine of this run, by the weights that it was asked for. RuntimeError: it has read other ids
    than those that are trained on."""
    try:
        reply = _Reply.model_validate_json(body)
        (choice,) = reply.choices
    except ValueError as error:  # pydantic's ValidationError is one
        raise EndpointError(describe_error(error)) from error
    given = f"the engine read {len(reply.prompt_token_ids)} tokens, and was sent {len(sent_ids)}"
    if reply.prompt_token_ids != sent_ids:
        raise RuntimeError(f"{given}: it expands the placeholders of pictures otherwise than the renderer")
    spans = choice.weight_versions or []
    labels, num_versions = {span.version for span in spans}, sum(span.end - span.start for span in spans)
    logprobs = [each.logprob for each in choice.logprobs.content] if choice.logprobs else []
    if choice.token_ids and (labels != {label} or not len(choice.token_ids) == len(logprobs) == num_versions):
        raise EndpointError(f"{len(choice.token_ids)} tokens of weights {', '.join(sorted(labels))}, asked for {label}")
    if len(choice.token_ids) > max_tokens:
        raise EndpointError(f"{len(choice.token_ids)} tokens, asked for {max_tokens}")
    return PartialCompletion(choice.token_ids, logprobs, choice.finish_reason)


def find_stop(token_ids: list[int], before: int, stop: Sequence[str], decode: Callable[[list[int]], str]) -> int | None:
    """Where a stop text is complete that no server has seen whole: it begins in the first `before` tokens and ends behind them.

    A token is a byte at least, a character four bytes at most.
    """
    reach = 4 * max(map(len, stop))
    first, last = max(0, before - reach), min(len(token_ids), before + reach)
    window = decode(token_ids[first:last])
    if not any(each in window for each in stop):
        return None
    for end in range(before + 1, last + 1):
        text = decode(token_ids[first:end])
        if any(each in text for each in stop):
            return end
    return None


def _data_url(image: Image) -> str:
    """The picture at its final size, without loss."""
    file = io.BytesIO()
    image.pil.save(file, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
