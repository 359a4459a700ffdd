r"""HTTP server of the Lewis listener, which identifies the candidate that a description refers to.

    python -m megatron_rl.tasks.lewis.server.listener_app --model runs/listener/final \
        --root data/lewis --port 9000

    POST /score /batch_score      422 invalid request, 404 a hash that was not sent (the body names
                                  it), 503 retry later
    GET  /health /metrics         name, version, limits; Prometheus text
    POST /weights                 with --trained, from the run that trains the listener
                                  (weight_updates.py)

The messages are defined in tasks/lewis/listener_protocol.py.

For each image, p(yes) is computed in one forward pass. The prompt has the format of the chat
template and contains the image followed by the question. The value p(yes) is the total probability
of the next tokens that mean yes (yes, Yes or YES, with or without a leading space), divided by the
total probability of the next tokens that mean yes or no. If scoring fails, the response has an HTTP
error status and contains no score.

Prompts of all requests are batched together. If several prompts contain the same image, one of
these prompts is computed first. The other prompts then find the image in the engine's prefix cache.
"""

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fastapi import FastAPI, Request

from megatron_rl.config import require
from megatron_rl.errors import InfraError
from megatron_rl.rollout.engine import SamplingSettings
from megatron_rl.tasks.lewis.listener_protocol import (
    MAX_CANDIDATES,
    BatchScoreResponse,
    CandidateImage,
    ListenerScore,
    ScoreBatch,
    ScoreItem,
    ScoreResponse,
    make_listener_score,
)
from megatron_rl.tasks.lewis.server.image_cache import ImageCache
from megatron_rl.tasks.lewis.server.model_server import make_application, run_server
from megatron_rl.tasks.lewis.server.prompt_renderer import RenderSlots, render_prompts, store_candidates
from megatron_rl.tasks.lewis.server.request_limiter import RequestLimiter, RequestLimits
from megatron_rl.tasks.lewis.server.weight_updates import WeightUpdateHandler
from megatron_rl.types import TokenSequence
from megatron_rl_sandbox.http import make_retry_error, openapi_body, read_body, run_while_connected

if TYPE_CHECKING:  # these import torch
    from transformers import PreTrainedTokenizerBase

    from megatron_rl.tasks.lewis.server.engine_holder import EngineHolder

MAX_LOGPROB_TOKENS = 128
"""Maximum number of tokens for which vLLM 0.32 returns logprobs per request (MAX_LOGPROB_TOKEN_IDS
in sampling_params.py).
"""
MAX_RENDERED_PER_REQUEST, MAX_RENDERED = MAX_CANDIDATES, 2 * MAX_CANDIDATES
"""Maximum number of rendered images in memory at a time, per request and in total. A rendered image
of 401,408 pixels takes 14 MB.
"""


def find_word_tokens(tokenizer: "PreTrainedTokenizerBase", word: str) -> list[int]:
    """Return the ids of all tokens that match `word`, ignoring case and surrounding whitespace."""
    return [number for number in range(len(tokenizer)) if cast(str, tokenizer.decode([number])).strip().casefold() == word]


def logsumexp(logprobs: Sequence[float]) -> float:
    """Return the logarithm of the sum of exponentials. The result is NaN if an input is NaN."""
    most = max(logprobs)
    return most + math.log(sum(math.exp(each - most) for each in logprobs))


def split_by_image_count(counts: Sequence[int]) -> list[list[int]]:
    """Split items into consecutive groups with at most MAX_RENDERED_PER_REQUEST images each.

    Args:
        counts: Number of images per item.

    Returns:
        One list of item indices per group.
    """
    found: list[list[int]] = []
    num_remaining = 0
    for place, count in enumerate(counts):
        if count > num_remaining:
            found.append([])
            num_remaining = MAX_RENDERED_PER_REQUEST
        found[-1].append(place)
        num_remaining -= count
    return found


class YesScorer:
    """Computes log p(yes) of prompts with the inference engine."""

    def __init__(self, engine: "EngineHolder") -> None:
        """Find the tokens that mean yes or no.

        Raises:
            ValueError: The tokenizer lacks a token for yes or a token for no, or has more than
                MAX_LOGPROB_TOKENS tokens for both words together.
        """
        self.engine = engine
        self.yes_ids, self.no_ids = (find_word_tokens(engine.renderer.tokenizer, word) for word in ("yes", "no"))
        for word, tokens in (("yes", self.yes_ids), ("no", self.no_ids)):
            require(bool(tokens), "--model", word, "the model's tokenizer has no token for this word; choose another model")
        num = len(self.yes_ids) + len(self.no_ids)
        require(
            num <= MAX_LOGPROB_TOKENS,
            "--model",
            num,
            f"too many tokens mean yes or no; choose a model with at most {MAX_LOGPROB_TOKENS} such tokens",
        )
        self._prefix_events: dict[str, asyncio.Event] = {}
        """Maps the key of an image to an event that is set when the first prompt with this image is
        done.
        """

    async def compute_yes_logprob(self, context: TokenSequence) -> float:
        """Return log p(yes) for a prompt with one image.

        Raises:
            ValueError: The prompt does not fit into the engine's sequence length.
            InfraError: The engine failed or returned a non-finite number.
        """
        async with self._wait_for_shared_prefix(context.images[0].key):
            sampling = SamplingSettings(max_tokens=1, temperature=1.0, seed=0, logprob_token_ids=(*self.yes_ids, *self.no_ids))
            completion = await self.engine.generate(context, sampling)
        (told,) = completion.requested_logprobs
        logprob = logsumexp(told[: len(self.yes_ids)]) - logsumexp(told)
        if not math.isfinite(logprob):
            raise InfraError("the model returned no finite logprob")
        return min(logprob, 0.0)

    @contextlib.asynccontextmanager
    async def _wait_for_shared_prefix(self, picture: str) -> AsyncIterator[None]:
        ahead = self._prefix_events.get(picture)
        if ahead is not None:
            await ahead.wait()
            yield
            return
        done = self._prefix_events[picture] = asyncio.Event()
        try:
            yield
        finally:
            del self._prefix_events[picture]
            done.set()


class ListenerService:
    """Request handlers of the listener server."""

    def __init__(
        self, engine: "EngineHolder", image_cache: ImageCache, *, limits: RequestLimits, name: str, log: Path | None = None
    ) -> None:
        """Create the service.

        Args:
            engine: Engine that runs the model.
            image_cache: Cache that reads the images of requests.
            limits: Limits on requests.
            name: Name of the server in the response to /health.
            log: JSON-lines file to which every answer is written; None disables the log.
        """
        self.scorer, self.image_cache, self.name = YesScorer(engine), image_cache, name
        self._render_slots = RenderSlots(MAX_RENDERED)
        self.limiter = RequestLimiter("listener", limits, busy_s=lambda: engine.busy_s, log=log)

    async def score(self, request: Request) -> ScoreResponse:
        """Score one item, for POST /score."""
        began = time.perf_counter()
        item = await read_body(request, ScoreItem)
        (result,), version = await run_while_connected(request, self._score_items([item]))
        return ScoreResponse(**result.model_dump(), took=time.perf_counter() - began, version=version)

    async def batch_score(self, request: Request) -> BatchScoreResponse:
        """Score several items, for POST /batch_score."""
        began = time.perf_counter()
        results, version = await run_while_connected(request, self._score_items((await read_body(request, ScoreBatch)).batch))
        return BatchScoreResponse(results=results, took=time.perf_counter() - began, version=version)

    async def _score_items(self, items: Sequence[ScoreItem]) -> tuple[list[ListenerScore], str]:
        """Return the scores of the items, and the version of the weights."""
        async with self.limiter.admit(), self.scorer.engine.hold_weights() as version:
            shown = await store_candidates(self.scorer.engine, self.image_cache, [item.images for item in items])
            logprobs: list[float] = []
            for part in split_by_image_count([len(each) for each in shown]):
                async with self._render_slots.acquire(sum(len(shown[number]) for number in part)):
                    logprobs += await self._score_part({number: (shown[number], items[number].question) for number in part})
        given = iter(logprobs)
        results = [make_listener_score([next(given) for _ in each], topk=item.topk) for item, each in zip(items, shown, strict=True)]
        self.limiter.count_answered(items=len(items), pictures=len(logprobs))
        told = [{"question": item.question, **result.model_dump()} for item, result in zip(items, results, strict=True)]
        self.limiter.log_answers(told, version=version)
        return results, version

    async def _score_part(self, part: Mapping[int, tuple[Sequence[CandidateImage], str]]) -> list[float]:
        """Return log p(yes) for each image in a group of items.

        The function frees the rendered images when it returns.

        Args:
            part: Maps the index of an item in the request to its candidates and its question.
        """
        asked = [self._render_prompts(shown, question, where=f"item {number}") for number, (shown, question) in part.items()]
        contexts = [context for of_item in await asyncio.gather(*asked) for context in of_item]
        return await asyncio.gather(*map(self.scorer.compute_yes_logprob, contexts))

    async def _render_prompts(self, candidates: Sequence[CandidateImage], question: str, *, where: str) -> list[TokenSequence]:
        """Return the prompts of an item, one for each candidate.

        Raises:
            ValueError: Two candidates are the same image, or an image is invalid.
        """
        found = await render_prompts(self.scorer.engine, self.image_cache, candidates, question, where=where)
        digests = [digest for digest, _ in found]
        for index, digest in enumerate(digests):
            if digest in digests[:index]:
                raise ValueError(f"{where}: candidates {digests.index(digest)} and {index} are the same image")
        return [context for _, context in found]

    async def health(self) -> dict[str, Any]:
        """Return the server's status, name, version, tokens and limits, for GET /health."""
        engine = self.scorer.engine
        if not engine.is_healthy:
            raise make_retry_error(503, "the engine has failed; restart the server")
        tokens = {"yes": self.scorer.yes_ids, "no": self.scorer.no_ids}
        return {"status": "ok", "name": self.name, "version": engine.version, "tokens": tokens, "limits": self.limiter.limits.to_json()}


def create_app(service: ListenerService, *, token: str = "", receiver: WeightUpdateHandler | None = None, host: str = "") -> FastAPI:
    """Return the FastAPI application with the routes of the listener."""
    bodies, limits = ("score", "batch_score"), service.limiter.limits
    app = make_application("listener", limits=limits, large_body_routes=bodies, token=token, receiver=receiver, host=host)
    app.post("/score", openapi_extra=openapi_body(ScoreItem))(service.score)
    app.post("/batch_score", openapi_extra=openapi_body(ScoreBatch))(service.batch_score)
    app.get("/health")(service.health)
    app.get("/metrics")(service.limiter.metrics)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server and return its exit status."""

    def made(
        room: "EngineHolder", pictures: ImageCache, *, token: str, receiver: WeightUpdateHandler | None, host: str, **options: Any
    ) -> FastAPI:
        return create_app(ListenerService(room, pictures, **options), token=token, receiver=receiver, host=host)

    return run_server("listener", made, description=__doc__, port=9000, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
