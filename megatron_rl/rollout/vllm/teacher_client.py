"""Client of vLLM servers that return a teacher's logprobs of a rollout's tokens.

After an episode, each of its sequences is sent once, with its token ids and images, and the server
returns the logprob of every token under the teacher (prompt logprobs). A teacher that fails is an
infrastructure error of the episode.

Written against vLLM 0.32.0: entrypoints/scale_out/token_in_token_out/{protocol,serving}.py.
"""

import asyncio
import heapq
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from megatron_rl.clients.endpoint_pool import Endpoint, EndpointError, EndpointPool, InvalidReply, KeyRefused, RequestRejected, to_one_line
from megatron_rl.config import TeacherServerSettings
from megatron_rl.errors import PermanentInfraError
from megatron_rl.rollout.vllm.client import GENERATE_PATH, collapse_image_tokens, make_data_url
from megatron_rl.types import Rollout, TokenSequence, TopTokens
from megatron_rl_sandbox.bounded_http import DENIED_STATUSES, BoundedClient, NoResponse

T = TypeVar("T")
TOKENIZE_PATH = "/tokenize"
TOKENIZER_PROBE = '<|vision_start|><|image_pad|><|vision_end|> Step 12: {"current number": 3.5}\n\tna\u00efve \u6570 \u2713'
LOGPROB_PROBE = "one two three"
"""Texts that a server must tokenize as the policy does, and score."""
CONNECT_TIMEOUT_S = 10.0
MAX_BYTES_PER_TOKEN, MAX_BYTES_PER_TOP_TOKEN, MAX_OTHER_BYTES = 1 << 9, 1 << 8, 1 << 20
"""Limits on the size of a reply in bytes: per token, per top token of each token, and for the rest
of the reply.
"""
MIN_LOGPROB = -9999.0
"""Value that vLLM returns for a logprob of minus infinity."""
REJECTED_STATUSES = (400, 404, 405, 413, 422)
_NO_TOKENS_REMEDY = "start it with vllm serve MODEL --enable-scale-out"


class _Logprob(BaseModel):
    logprob: float


class _Tokens(BaseModel):
    tokens: list[int]


class _Reply(BaseModel):
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, _Logprob] | None] | None


class TeacherClient:
    """Client of servers that serve the same teacher."""

    def __init__(self, settings: TeacherServerSettings, *, image_token_id: int, token: str = "", top_k: int = 0) -> None:
        """Create a client.

        `token` is the servers' access token. With `top_k`, the client also requests the teacher's
        most probable tokens.
        """
        self._settings, self._image_token_id, self._token, self._top_k = settings, image_token_id, token, top_k
        self._http: BoundedClient | None = None
        self._pool = EndpointPool(
            settings.urls, name="distill.server", max_attempts=settings.max_attempts, timeout_s=settings.timeout_s,
            outage_timeout_s=settings.outage_timeout_s, concurrency=settings.concurrency,
        )  # fmt: skip

    async def start(self, encode: Callable[[str], list[int]]) -> None:
        """Connect in the running event loop; compare the tokenizer, and request a few logprobs.

        `encode` returns the policy's token ids of a text.

        Raises:
            InfraError: No server returns the logprobs; the message names the server and the reason.
            PermanentInfraError: The server's tokenizer gives a text other ids.
        """
        self._pool.start()
        self._http = BoundedClient(token=self._token)
        body = {"prompt": TOKENIZER_PROBE, "add_special_tokens": False}
        found = await self._pool.request(partial(self._send, path=TOKENIZE_PATH, body=body, parse=parse_tokens))
        if found != (expected := encode(TOKENIZER_PROBE)):
            place = next((place for place, (one, other) in enumerate(zip(found, expected, strict=False)) if one != other), 0)
            raise PermanentInfraError(
                f"distill.server.urls: the server's tokenizer differs from the policy's: token {place} of a text has the ids "
                f"{found[place : place + 1]} there and {expected[place : place + 1]} here; serve a model of the policy's family"
            )
        await self.score(TokenSequence(token_ids=encode(LOGPROB_PROBE)))

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()

    async def add_logprobs(
        self, sequences: Sequence[TokenSequence], extend: Callable[[TokenSequence], TokenSequence] | None = None
    ) -> None:
        """Set teacher_logprobs, and teacher_top, of each sequence that has sampled tokens.

        With `extend`, the teacher reads its result, a sequence with the same sampled tokens in the
        same order.

        Raises:
            InfraError: All attempts failed.
            PermanentInfraError: The servers reject a sequence or return unusable replies.
        """
        sampled = [sequence for sequence in sequences if any(sequence.loss_mask)]
        read = [extend(sequence) if extend else sequence for sequence in sampled]
        found = await asyncio.gather(*map(self.score, read))
        for sequence, other, scores in zip(sampled, read, found, strict=True):
            logprobs = (each.logprob for each, mask in zip(scores, other.loss_mask, strict=True) if mask)
            sequence.set_column("teacher_logprobs", [next(logprobs) if mask else 0.0 for mask in sequence.loss_mask])
            if self._top_k:
                sequence.teacher_top = join_top_tokens(scores, other.loss_mask, top_k=self._top_k)

    async def score(self, sequence: TokenSequence) -> "list[TokenScore]":
        """Return the teacher's score of every token given the tokens before it; 0 for the first.

        Raises the errors of `add_logprobs`.
        """
        urls = await asyncio.gather(*(asyncio.to_thread(make_data_url, image) for image in sequence.images))
        body = {
            "token_ids": collapse_image_tokens(sequence.token_ids, self._image_token_id),
            "content_parts": [
                {"type": "image_url", "url": url, "uuid": image.key} for image, url in zip(sequence.images, urls, strict=True)
            ] or None,
            "sampling_params": {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": self._top_k, "detokenize": False},
            "return_token_ids": True,
        }  # fmt: skip
        most = MAX_OTHER_BYTES + (MAX_BYTES_PER_TOKEN + MAX_BYTES_PER_TOP_TOKEN * self._top_k) * len(sequence.token_ids)
        parse = partial(parse_scores, token_ids=sequence.token_ids, top_k=self._top_k)
        return await self._pool.request(partial(self._send, path=GENERATE_PATH, body=body, parse=parse, max_bytes=most))

    async def _send(
        self, endpoint: Endpoint, *, path: str, body: dict[str, object], parse: Callable[[bytes], list[T]], max_bytes: int = MAX_OTHER_BYTES
    ) -> list[T]:
        assert self._http is not None, "the client has not been started"
        url, limit_s = endpoint.url.rstrip("/") + path, self._settings.timeout_s
        try:
            answer = await self._http.request(
                "POST", url, body, max_bytes=max_bytes, timeout_s=limit_s, connect_timeout_s=CONNECT_TIMEOUT_S
            )  # fmt: skip
        except NoResponse as error:
            raise EndpointError(to_one_line(str(error))) from error
        said = f"HTTP {answer.status}: {to_one_line(answer.text)}"
        if answer.status in DENIED_STATUSES:
            raise KeyRefused(f"HTTP {answer.status}: requires a valid token; set distill.server.token_file=FILE")
        if answer.status in REJECTED_STATUSES:
            remedy = f"; {_NO_TOKENS_REMEDY}" if answer.status in (404, 405) else ""
            if self._top_k and "logprobs" in answer.text:
                remedy = f"; start the server with --max-logprobs {self._top_k}, or set a smaller distill.top_k"
            raise RequestRejected(said + remedy)
        if not answer.is_success:
            raise EndpointError(said)
        return parse(answer.content)


class TeacherClients:
    """Clients of the servers of one or several teachers, chosen by data source."""

    def __init__(
        self, settings: TeacherServerSettings, *, image_token_id: int, token: str = "", top_k: int = 0,
        extend: Callable[[TokenSequence, Rollout], TokenSequence] | None = None,
    ) -> None:  # fmt: skip
        """Create one client for each distinct list of servers; see TeacherClient.

        `extend` returns what the teacher reads of a sequence of a rollout
        (distill.privileged_prompt).
        """
        self._settings, lists, self._extend = settings, [settings.urls, *settings.urls_by_source.values()], extend
        self._clients = {
            tuple(urls): TeacherClient(
                replace(settings, urls=urls, urls_by_source={}), image_token_id=image_token_id, token=token, top_k=top_k
            )
            for urls in lists
            if urls
        }

    async def start(self, encode: Callable[[str], list[int]]) -> None:
        """Start every client; see TeacherClient.start."""
        for client in self._clients.values():
            await client.start(encode)

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            await client.close()

    async def add_logprobs(self, rollout: Rollout) -> None:
        """Add the logprobs of the teacher of the rollout's data source to its sequences.

        Does nothing if the source has no teacher. Raises the errors of TeacherClient.add_logprobs.
        """
        urls = self._settings.urls_by_source.get(rollout.source, self._settings.urls)
        if urls:
            given = self._extend
            extend = None if given is None else lambda sequence: given(sequence, rollout)
            await self._clients[tuple(urls)].add_logprobs(rollout.sequences, extend)


def parse_tokens(content: bytes) -> list[int]:
    """Return the token ids in a reply; raise InvalidReply if it has none."""
    try:
        return _Tokens.model_validate_json(content).tokens
    except ValidationError as error:
        raise InvalidReply(to_one_line(str(error))) from error


class TokenScore(NamedTuple):
    """Logprobs that a server returned for one token."""

    logprob: float
    top: Sequence[tuple[int, float]] = ()
    """Ids and logprobs of the most probable tokens, the most probable one first."""


def join_top_tokens(scores: Sequence[TokenScore], loss_mask: Sequence[int], *, top_k: int) -> TopTokens:
    """Return the most probable tokens of the scores at which `loss_mask` is 1."""
    sampled = [score for score, mask in zip(scores, loss_mask, strict=True) if mask]
    rows = [[*score.top, *[(-1, -math.inf)] * (top_k - len(score.top))] for score in sampled]
    ids, logprobs = zip(*(entry for row in rows for entry in row), strict=True)
    return TopTokens(top_k, array("i", ids), array("f", logprobs))


def parse_scores(content: bytes, token_ids: list[int], *, top_k: int = 0) -> list[TokenScore]:
    """Return the logprobs of `token_ids` in a reply, and with `top_k` the most probable tokens.

    Raises:
        InvalidReply: The reply is not a reply of the interface, or a logprob is missing, not
            finite, or positive.
        RequestRejected: The server has expanded the images to other tokens, or it returns no
            logprobs.
    """
    try:
        reply = _Reply.model_validate_json(content)
    except ValidationError as error:
        raise InvalidReply(to_one_line(str(error))) from error
    if reply.prompt_logprobs is None:
        raise RequestRejected("the server returns no prompt logprobs; use a vLLM server")
    if reply.prompt_token_ids != token_ids:
        given = f"the server received {len(reply.prompt_token_ids)} tokens, but {len(token_ids)} were sent"
        raise RequestRejected(f"{given}: it expands images differently; use the policy's processor and pixel limits")
    if len(reply.prompt_logprobs) != len(token_ids):
        raise InvalidReply(f"returned {len(reply.prompt_logprobs)} logprobs for {len(token_ids)} tokens")
    found = [TokenScore(0.0)]
    for token, entry in zip(token_ids[1:], reply.prompt_logprobs[1:], strict=True):
        value = entry[token].logprob if entry and token in entry else math.nan
        if not MIN_LOGPROB < value <= 0.0:
            raise InvalidReply(f"returned the logprob {value} for token {token}")
        top = heapq.nlargest(top_k, ((each.logprob, other) for other, each in (entry or {}).items()))
        if not all(MIN_LOGPROB <= logprob <= 0.0 for logprob, _ in top):
            raise InvalidReply(f"returned the logprobs {[logprob for logprob, _ in top][:8]} at token {token}")
        found.append(TokenScore(value, [(other, logprob) for logprob, other in top]))
    return found
