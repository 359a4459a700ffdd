"""Client that requests one turn from a vLLM server and validates the reply.

`/inference/v1/generate` accepts token ids and returns token ids, logprobs and weight versions. An
image is sent to each server only once; later requests refer to the image by its key. A turn with a
new image first sends a separate request for a single token, and other turns with the same image
wait for this request.

Written against vLLM 0.32.0: entrypoints/scale_out/token_in_token_out/{protocol,serving}.py.
"""

import asyncio
import base64
import io
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus

import numpy as np
from pydantic import BaseModel

from megatron_rl.clients.endpoint_pool import EndpointError, describe_error, to_one_line
from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.rollout.server_backend import ServerBackend
from megatron_rl.rollout.vllm.sampler import NUM_SAMPLED_KEY, SEED_KEY
from megatron_rl.types import Image, SpecialTokens
from megatron_rl_sandbox.bounded_http import BoundedClient, NoResponse

GENERATE_PATH = "/inference/v1/generate"
MAX_BYTES_PER_TOKEN, MAX_OTHER_BYTES = 1 << 11, 1 << 20
"""Limits on the size of a reply in bytes: per prompt or sampled token, and for the rest of the
reply. The experts of a token in 94 sparse layers, 8 in each, take 1,003 bytes.
"""
ABORTED = "abort"
"""Finish reason of an aborted request; the reply contains the tokens sampled so far."""


class _Logprob(BaseModel):
    logprob: float


class _Logprobs(BaseModel):
    content: list[_Logprob]


class _Span(BaseModel):
    version: str
    start: int
    end: int


class _Choice(BaseModel):
    routed_experts: str | None = None
    finish_reason: str
    token_ids: list[int]
    logprobs: _Logprobs | None
    weight_versions: list[_Span] | None


class _Reply(BaseModel):
    prompt_token_ids: list[int]
    choices: list[_Choice]


class _ImageForgotten(EndpointError):
    """Raised if the server has evicted an image that the request refers to."""


@dataclass(slots=True, frozen=True)
class GenerateRequest:
    """Request for a complete turn."""

    token_ids: list[int]
    images: list[Image]
    sampling: SamplingSettings


@dataclass(slots=True, frozen=True)
class PartialCompletion:
    """Tokens of a turn that were sampled by one call of `GenerateClient.generate`."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """Reason why generation ended: "stop", "length" or ABORTED."""
    num_from_first_request: int = 0
    """Number of leading tokens that were sampled by a separate first request, which sent a new
    image. The server cannot match a stop string that begins in these tokens.
    """
    routed_experts: list[bytes] = field(default_factory=list)
    """Rows of TokenSequence.routed_experts that no earlier call has returned."""


@dataclass(slots=True, frozen=True, kw_only=True)
class GenerateClient:
    """Client that requests turns from vLLM servers."""

    http: BoundedClient
    special_tokens: SpecialTokens
    limit_s: float
    """Timeout in seconds for one request, including its complete reply."""
    connect_s: float
    """Timeout in seconds for connecting to a server."""

    async def generate(
        self, server: ServerBackend, request: GenerateRequest, partial_completion: Completion, *, label: str, salt: str
    ) -> PartialCompletion:
        """Sample the rest of a turn.

        Args:
            server: Server that receives the request.
            request: Request for the complete turn.
            partial_completion: Tokens of the turn that earlier calls have sampled.
            label: Label of the weights that the server must use.
            salt: Cache salt, which separates prefixes computed with different weights.

        Raises:
            KeyRefused: The server rejects the token. KeyRefused is a subclass of EndpointError.
            EndpointError: There is no reply, or the reply is invalid.
            ValueError: vLLM rejects the request.
            RuntimeError: The prompt ids that the server reports differ from the ids that were sent.
        """
        call = partial(self._send_with_images, server, request, label=label, salt=salt)
        num_said, most = len(partial_completion.token_ids), request.sampling.max_tokens
        if num_said == 0:
            async with _sending_images(server, {image.key for image in request.images}) as brings:
                first = await call([], most=1) if brings else None
            if first is not None:
                if first.finish_reason != "length" or most == 1:
                    return first
                more = await call(first.token_ids, most=most - 1, num_rows=len(first.routed_experts))
                return PartialCompletion(
                    first.token_ids + more.token_ids, first.logprobs + more.logprobs, more.finish_reason, num_from_first_request=1,
                    routed_experts=first.routed_experts + more.routed_experts,
                )  # fmt: skip
        return await call(partial_completion.token_ids, most=most - num_said, num_rows=len(partial_completion.routed_experts))

    async def _send_with_images(
        self, server: ServerBackend, request: GenerateRequest, sampled_ids: list[int], *,
        most: int, label: str, salt: str, num_rows: int = 0,
    ) -> PartialCompletion:  # fmt: skip
        """Request up to `most` tokens; resend the turn's images if the server has evicted any.

        `num_rows` is the number of rows of experts that earlier requests of the turn have returned.
        """
        try:
            return await self._call(server, request, sampled_ids, most=most, label=label, salt=salt, num_rows=num_rows)
        except _ImageForgotten:
            server.known_images.difference_update(image.key for image in request.images)
            return await self._call(server, request, sampled_ids, most=most, label=label, salt=salt, num_rows=num_rows)

    async def _call(
        self, server: ServerBackend, request: GenerateRequest, sampled_ids: list[int], *,
        most: int, label: str, salt: str, num_rows: int = 0,
    ) -> PartialCompletion:  # fmt: skip
        asked, began = request.token_ids + sampled_ids, time.monotonic()
        first_row = request.sampling.routed_experts_start + num_rows
        body = {
            "token_ids": collapse_image_tokens(asked, self.special_tokens.image_token_id),
            "content_parts": [await self.image_reference(image, server) for image in request.images] or None,
            "sampling_params": self._sampling_params(request.sampling, len(sampled_ids), most) | {"routed_experts_prompt_start": first_row},
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
                raise _ImageForgotten("no longer has an image in its cache")
            raise ValueError(to_one_line(answer.text))
        try:
            part = _parse_reply(server.check_reply(answer, GENERATE_PATH), asked, label, max_tokens=most, first_row=first_row)
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
            "stop_token_ids": list(self.special_tokens.stop_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "detokenize": bool(sampling.stop),
        }

    async def image_reference(self, image: Image, server: ServerBackend) -> dict[str, object]:
        """Return an image as a JSON object, without the pixel data if the server has the image."""
        data = None if image.key in server.known_images else await asyncio.to_thread(make_data_url, image)
        return {"type": "image_url", "url": data, "uuid": image.key}


@asynccontextmanager
async def _sending_images(server: ServerBackend, image_keys: set[str]) -> AsyncIterator[bool]:
    """Yield True if this request must send images that the server lacks.

    If other requests are sending images that this request needs, waits for these requests first.

    Raises:
        EndpointError: Another request failed to send an image that this request needs, and the
            server is backing off.
    """
    while unknown := image_keys - server.known_images:
        if not (coming := unknown & server.pending_images.keys()):
            break
        await server.pending_images[coming.pop()].wait()
        if server.endpoint.backoff_until > time.monotonic():
            raise EndpointError("is backing off: the request that sent the image of this turn failed")
    arrived = asyncio.Event()
    server.pending_images.update(dict.fromkeys(unknown, arrived))
    try:
        yield bool(unknown)
    finally:
        for key in unknown:
            del server.pending_images[key]
        arrived.set()


def _parse_reply(body: bytes, sent_ids: list[int], label: str, *, max_tokens: int, first_row: int) -> PartialCompletion:
    """Parse and check a reply. `first_row` is the first token of which the experts are returned.

    Raises:
        EndpointError: The reply is invalid, or was sampled with weights other than `label`.
        RuntimeError: The prompt ids that the server reports differ from `sent_ids`.
    """
    try:
        reply = _Reply.model_validate_json(body)
        (choice,) = reply.choices
    except ValueError as error:  # pydantic's ValidationError is a ValueError
        raise EndpointError(describe_error(error)) from error
    given = f"the engine received {len(reply.prompt_token_ids)} tokens, but {len(sent_ids)} were sent"
    if reply.prompt_token_ids != sent_ids:
        raise RuntimeError(f"{given}: the engine expands image placeholders differently from the renderer")
    spans = choice.weight_versions or []
    labels, num_versions = {span.version for span in spans}, sum(span.end - span.start for span in spans)
    logprobs = [each.logprob for each in choice.logprobs.content] if choice.logprobs else []
    if choice.token_ids and (labels != {label} or not len(choice.token_ids) == len(logprobs) == num_versions):
        raise EndpointError(
            f"returned {len(choice.token_ids)} tokens sampled with weights {', '.join(sorted(labels))}, expected weights {label}"
        )
    if len(choice.token_ids) > max_tokens:
        raise EndpointError(f"returned {len(choice.token_ids)} tokens, but at most {max_tokens} were requested")
    experts = decode_routed_experts(choice.routed_experts) if choice.routed_experts else []
    num_computed = len(sent_ids) + len(choice.token_ids) - 1 - first_row
    if experts and len(experts) != num_computed:
        raise EndpointError(f"returned the experts of {len(experts)} tokens, expected {num_computed}")
    return PartialCompletion(choice.token_ids, logprobs, choice.finish_reason, routed_experts=experts)


def decode_routed_experts(text: str) -> list[bytes]:
    """Decode the experts in a reply, a base64-encoded NumPy file, as one row for each token.

    Raises:
        EndpointError: The text is no NumPy file with integers [tokens, sparse layers, top_k].
    """
    try:
        experts = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise EndpointError(f"routed_experts: {to_one_line(str(error))}") from error
    if experts.ndim != 3 or experts.dtype not in (np.uint8, np.uint16):
        raise EndpointError(f"routed_experts: returned {experts.dtype} numbers of shape {experts.shape}")
    return [row.tobytes() for row in experts]


def find_stop(token_ids: list[int], before: int, stop: Sequence[str], decode: Callable[[list[int]], str]) -> int | None:
    """Find a stop string that spans two requests; return the number of tokens up to its end.

    The stop string begins in the first `before` tokens and ends after them, so no server could
    match it. Returns None if there is no such string. The search is limited to a window around
    `before`. On each side, the window has four tokens for each character of the longest stop
    string, because a character has at most four bytes and a token has at least one byte.
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


def collapse_image_tokens(token_ids: list[int], image_token_id: int) -> list[int]:
    """Return the ids with a single placeholder per image.

    The server expands the placeholders.
    """
    before = [None, *token_ids[:-1]]
    return [token for token, last in zip(token_ids, before, strict=True) if token != image_token_id or last != image_token_id]


def make_data_url(image: Image) -> str:
    """Return the image at its final size as a data URL, losslessly encoded."""
    file = io.BytesIO()
    assert image.pil is not None
    image.pil.save(file, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
