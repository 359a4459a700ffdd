"""The listener of the Lewis game over HTTP: which of the candidates does a description mean? (messages: tasks/lewis/listener_protocol.py)

    python -m megatron_rl.tasks.lewis.server.listener_app --model runs/listener/final --root data/lewis --port 9000

    POST /score /batch_score      422 what cannot be answered, 404 a hash that was not sent (the body names it), 503 come again later
    GET  /health /metrics         name, version, limits; Prometheus text
    POST /weights                 with --trained, from the run that trains the listener (weight_updates.py)

p(yes) of a picture: the chat template with the picture and the question behind it, one forward pass, and of what might come next the mass
of all tokens that say yes (yes, Yes, YES, with a blank before it) beside that of all that say no. Whatever goes wrong is a status and never
a number. Prompts of all requests are computed together; those that show the same picture wait for the first of them, whose prefix is then
in the engine's cache.
"""

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request

from megatron_rl.config import require
from megatron_rl.errors import InfraError
from megatron_rl.rollout.engine import SamplingSettings
from megatron_rl.tasks.lewis.listener_protocol import MOST_CANDIDATES, Answer, Answers, Batch, Candidate, Heard, Item, heard
from megatron_rl.tasks.lewis.server.image_cache import Pictures
from megatron_rl.tasks.lewis.server.model_server import application, run_server
from megatron_rl.tasks.lewis.server.prompt_renderer import Places, prompts, taken
from megatron_rl.tasks.lewis.server.request_limiter import Admission, Limits
from megatron_rl.tasks.lewis.server.weight_updates import Receiver
from megatron_rl.types import TokenSequence
from sandbox.http import busy, documented, read, while_connected

if TYPE_CHECKING:  # they bring torch
    from transformers import PreTrainedTokenizerBase

    from megatron_rl.tasks.lewis.server.engine_holder import EngineRoom

MOST_ASKED = 128
"""Tokens whose logprobs vLLM 0.32 tells of (sampling_params.py, MAX_LOGPROB_TOKEN_IDS)."""
MOST_RENDERED, MOST_HELD = MOST_CANDIDATES, 2 * MOST_CANDIDATES
"""Pictures that are ready for the engine at a time, of a request and of all together: 14 MB each at 401,408 pixels."""


def surface_forms(tokenizer: "PreTrainedTokenizerBase", word: str) -> list[int]:
    """All tokens that are this word, however it is written and whatever blanks stand around it."""
    return [number for number in range(len(tokenizer)) if tokenizer.decode([number]).strip().casefold() == word]


def log_sum(logprobs: Sequence[float]) -> float:
    """The logarithm of the sum of what these are the logarithms of; NaN where one is."""
    most = max(logprobs)
    return most + math.log(sum(math.exp(each - most) for each in logprobs))


def slices(counts: Sequence[int]) -> list[list[int]]:
    """Places of items with so many pictures each, neighbors together as long as they have MOST_RENDERED at most."""
    found: list[list[int]] = []
    room = 0
    for place, count in enumerate(counts):
        if count > room:
            found.append([])
            room = MOST_RENDERED
        found[-1].append(place)
        room -= count
    return found


class Scorer:
    """log p(yes) of pictures, by an engine."""

    def __init__(self, room: "EngineRoom") -> None:
        """ValueError: the model has no token for yes, or none for no."""
        self.room = room
        self.yes, self.no = (surface_forms(room.renderer.tokenizer, word) for word in ("yes", "no"))
        for word, tokens in (("yes", self.yes), ("no", self.no)):
            require(bool(tokens), "--model", word, "its tokenizer has no token that says this; choose another model")
        num = len(self.yes) + len(self.no)
        require(num <= MOST_ASKED, "--model", num, f"tokens say yes or no, and the engine tells of {MOST_ASKED}; choose another model")
        self._first: dict[str, asyncio.Event] = {}
        """By picture whose prefix is being computed."""

    async def yes_logprob(self, context: TokenSequence) -> float:
        """ValueError: it does not fit. InfraError: the engine is in trouble."""
        async with self._behind_the_first(context.images[0].key):
            sampling = SamplingSettings(max_tokens=1, temperature=1.0, seed=0, asked=(*self.yes, *self.no))
            completion = await self.room.generate(context, sampling)
        (told,) = completion.asked
        logprob = log_sum(told[: len(self.yes)]) - log_sum(told)
        if not math.isfinite(logprob):
            raise InfraError("the model gave no number")
        return min(logprob, 0.0)

    @contextlib.asynccontextmanager
    async def _behind_the_first(self, picture: str) -> AsyncIterator[None]:
        ahead = self._first.get(picture)
        if ahead is not None:
            await ahead.wait()
            yield
            return
        done = self._first[picture] = asyncio.Event()
        try:
            yield
        finally:
            del self._first[picture]
            done.set()


class Listener:
    """What the routes do."""

    def __init__(self, room: "EngineRoom", pictures: Pictures, *, limits: Limits, name: str, log: Path | None = None) -> None:
        """`log` is a file that every answer is written to, one line of JSON each."""
        self.scorer, self.pictures, self.name = Scorer(room), pictures, name
        self._places = Places(MOST_HELD)
        self.admission = Admission("listener", limits, busy_s=lambda: room.busy_s, log=log)

    async def score(self, request: Request) -> Answer:
        began = time.perf_counter()
        item = await read(request, Item)
        (result,), version = await while_connected(request, self._heard([item]))
        return Answer(**result.model_dump(), took=time.perf_counter() - began, version=version)

    async def batch_score(self, request: Request) -> Answers:
        began = time.perf_counter()
        results, version = await while_connected(request, self._heard((await read(request, Batch)).batch))
        return Answers(results=results, took=time.perf_counter() - began, version=version)

    async def _heard(self, items: Sequence[Item]) -> tuple[list[Heard], str]:
        """And the version of the weights that they are by."""
        async with self.admission.admitted(), self.scorer.room.steady() as version:
            shown = await taken(self.scorer.room, self.pictures, [item.shown for item in items])
            logprobs: list[float] = []
            for part in slices([len(each) for each in shown]):
                async with self._places.held(sum(len(shown[number]) for number in part)):
                    logprobs += await self._scored({number: (shown[number], items[number].question) for number in part})
        given = iter(logprobs)
        results = [heard([next(given) for _ in each], topk=item.topk) for item, each in zip(items, shown, strict=True)]
        self.admission.count(items=len(items), pictures=len(logprobs))
        told = [{"question": item.question, **result.model_dump()} for item, result in zip(items, results, strict=True)]
        self.admission.write(told, version=version)
        return results, version

    async def _scored(self, part: Mapping[int, tuple[Sequence[Candidate], str]]) -> list[float]:
        """log p(yes) of all pictures of these items, by their numbers in the request. What was rendered is gone when it returns."""
        asked = [self._prompts(shown, question, where=f"item {number}") for number, (shown, question) in part.items()]
        contexts = [context for of_item in await asyncio.gather(*asked) for context in of_item]
        return await asyncio.gather(*map(self.scorer.yes_logprob, contexts))

    async def _prompts(self, shown: Sequence[Candidate], question: str, *, where: str) -> list[TokenSequence]:
        """ValueError, beside what prompts raises: a picture stands there twice."""
        found = await prompts(self.scorer.room, self.pictures, shown, question, where=where)
        digests = [digest for digest, _ in found]
        for index, digest in enumerate(digests):
            if digest in digests[:index]:
                raise ValueError(f"{where}: candidates {digests.index(digest)} and {index} are the same picture")
        return [context for _, context in found]

    async def health(self) -> dict[str, Any]:
        room = self.scorer.room
        if not room.is_well:
            raise busy(503, "the engine has failed; start the server anew")
        tokens = {"yes": self.scorer.yes, "no": self.scorer.no}
        return {"status": "ok", "name": self.name, "version": room.version, "tokens": tokens, "limits": self.admission.limits.told()}


def create_app(listener: Listener, *, token: str = "", receiver: Receiver | None = None, host: str = "") -> FastAPI:
    bodies, limits = ("score", "batch_score"), listener.admission.limits
    app = application("listener", limits=limits, bodies=bodies, token=token, receiver=receiver, host=host)
    app.post("/score", openapi_extra=documented(Item))(listener.score)
    app.post("/batch_score", openapi_extra=documented(Batch))(listener.batch_score)
    app.get("/health")(listener.health)
    app.get("/metrics")(listener.admission.metrics)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    def made(room: "EngineRoom", pictures: Pictures, *, token: str, receiver: Receiver | None, host: str, **options: Any) -> FastAPI:
        return create_app(Listener(room, pictures, **options), token=token, receiver=receiver, host=host)

    return run_server("listener", made, description=__doc__, port=9000, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
