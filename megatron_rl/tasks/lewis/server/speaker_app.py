"""The speaker of the Lewis game over HTTP: what is in the picture, so that a listener finds it among others?

    python -m megatron_rl.tasks.lewis.server.speaker_app --model runs/speaker/final --root data/lewis --port 9001

    POST /describe          {"image": a picture, "category": "mug"}          or {"image_path": path, "category": ..., "situation": true}
    POST /batch_describe    {"batch": [the same, ...]}
    -> {"results": [{"thinking", "coarse", "detailed", "state", "location", "text"}], "took": s, "version": v}, one result a picture
    POST /weights           with --trained, from the run that trains the speaker (weight_updates.py)
    GET  /health /metrics

A picture is a path below the server's roots, the base64 of an image file, or the SHA-256 of one that was sent before. Replies are greedy
and read as tasks/lewis/description.py reads them; what was not found in one is empty. With "situation" state and location are asked for.
Statuses are the listener's.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from fastapi import FastAPI, Request
from pydantic import Field, StringConstraints, model_validator

from megatron_rl.errors import InfraError
from megatron_rl.rollout.engine import SamplingSettings
from megatron_rl.tasks.lewis.description import PROMPT, SITUATION_PROMPT, parse_description
from megatron_rl.tasks.lewis.listener_protocol import MAX_ITEMS, CandidateImage, StrictMessage
from megatron_rl.tasks.lewis.server.image_cache import ImageCache
from megatron_rl.tasks.lewis.server.model_server import make_application, run_server
from megatron_rl.tasks.lewis.server.prompt_renderer import RenderSlots, render_prompts, store_candidates
from megatron_rl.tasks.lewis.server.request_limiter import RequestLimiter, RequestLimits
from megatron_rl.tasks.lewis.server.weight_updates import WeightUpdateHandler
from sandbox.http import make_retry_error, openapi_body, read_body, run_while_connected

if TYPE_CHECKING:  # it brings torch
    from megatron_rl.tasks.lewis.server.engine_holder import EngineHolder

MAX_REPLY_TOKENS = 512
"""Of a reply."""


class DescribeItem(StrictMessage):
    """A picture, and what kind of thing it shows."""

    image: CandidateImage | None = None
    image_path: Annotated[str, StringConstraints(max_length=4096)] = ""
    category: Annotated[str, StringConstraints(min_length=1, max_length=200)] = "object"
    situation: bool = False
    """Ask for state and location, too, by the game's longer prompt."""

    @model_validator(mode="after")
    def _check_single_source(self) -> Self:
        if (self.image is None) == (not self.image_path):
            raise ValueError("an item has image or image_path, and not both")
        return self

    @property
    def candidate(self) -> CandidateImage:
        return self.image or CandidateImage(path=self.image_path)

    @property
    def prompt(self) -> str:
        words = PROMPT.format(category=self.category)
        return f"{words} {SITUATION_PROMPT}" if self.situation else words

    @property
    def stop_text(self) -> str:
        """Of a reply."""
        return "</location>" if self.situation else "</detailed>"


class DescribeBatch(StrictMessage):
    batch: Annotated[list[DescribeItem], Field(min_length=1, max_length=MAX_ITEMS)]


class DescriptionResult(StrictMessage):
    thinking: str
    coarse: str
    detailed: str
    state: str
    location: str
    text: str
    """All of the reply."""


class DescribeResponse(DescriptionResult):
    took: float
    version: str


class DescribeBatchResponse(StrictMessage):
    results: list[DescriptionResult]
    took: float
    version: str


class SpeakerService:
    """What the routes do."""

    def __init__(
        self, engine: "EngineHolder", image_cache: ImageCache, *, limits: RequestLimits, name: str, log: Path | None = None
    ) -> None:
        self.engine, self.image_cache, self.name = engine, image_cache, name
        self._render_slots = RenderSlots(engine.settings.max_num_seqs)
        """Pictures, of all requests together, that are rendered or described: as many as the engine answers at a time. One that is rendered
        takes up to 14 MB."""
        self.limiter = RequestLimiter("speaker", limits, busy_s=lambda: engine.busy_s, log=log)

    async def describe(self, request: Request) -> DescribeResponse:
        began = time.perf_counter()
        (said,), version = await run_while_connected(request, self._describe_items([await read_body(request, DescribeItem)]))
        return DescribeResponse(**said.model_dump(), took=time.perf_counter() - began, version=version)

    async def batch_describe(self, request: Request) -> DescribeBatchResponse:
        began = time.perf_counter()
        results, version = await run_while_connected(request, self._describe_items((await read_body(request, DescribeBatch)).batch))
        return DescribeBatchResponse(results=results, took=time.perf_counter() - began, version=version)

    async def _describe_items(self, items: Sequence[DescribeItem]) -> tuple[list[DescriptionResult], str]:
        """And the version of the weights that they are by."""
        async with self.limiter.admit(), self.engine.hold_weights() as version:
            shown = await store_candidates(self.engine, self.image_cache, [[item.candidate] for item in items])
            tasks = [
                asyncio.create_task(self._generate_reply(each, items[number], where=f"item {number}")) for number, each in enumerate(shown)
            ]
            try:
                replies = await asyncio.gather(*tasks)
            finally:
                for task in tasks:  # the others, where one has failed
                    task.cancel()
        results = [_parse_reply(reply, category=item.category) for reply, item in zip(replies, items, strict=True)]
        self.limiter.count_answered(items=len(items), pictures=len(items))
        told = [{"category": item.category, **said.model_dump()} for item, said in zip(items, results, strict=True)]
        self.limiter.log_answers(told, version=version)
        return results, version

    async def _generate_reply(self, candidates: Sequence[CandidateImage], item: DescribeItem, *, where: str) -> str:
        sampling = SamplingSettings(max_tokens=MAX_REPLY_TOKENS, temperature=0.0, seed=0, stop=(item.stop_text,))
        async with self._render_slots.acquire(1):
            ((_, context),) = await render_prompts(self.engine, self.image_cache, candidates, item.prompt, where=where)
            completion = await self.engine.generate(context, sampling)
        if not completion.token_ids:
            raise InfraError("the model gave no reply")
        return self.engine.renderer.decode_response(completion.token_ids)

    async def health(self) -> dict[str, Any]:
        if not self.engine.is_healthy:
            raise make_retry_error(503, "the engine has failed; start the server anew")
        return {"status": "ok", "name": self.name, "version": self.engine.version, "limits": self.limiter.limits.to_json()}


def _parse_reply(reply: str, *, category: str) -> DescriptionResult:
    said = parse_description(reply, category=category)
    return DescriptionResult(
        thinking=said.thinking, coarse=said.coarse, detailed=said.detailed, state=said.state, location=said.location, text=reply
    )  # fmt: skip


def create_app(service: SpeakerService, *, token: str = "", receiver: WeightUpdateHandler | None = None, host: str = "") -> FastAPI:
    bodies, limits = ("describe", "batch_describe"), service.limiter.limits
    app = make_application("speaker", limits=limits, large_body_routes=bodies, token=token, receiver=receiver, host=host)
    app.post("/describe", openapi_extra=openapi_body(DescribeItem))(service.describe)
    app.post("/batch_describe", openapi_extra=openapi_body(DescribeBatch))(service.batch_describe)
    app.get("/health")(service.health)
    app.get("/metrics")(service.limiter.metrics)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    def made(
        room: "EngineHolder", pictures: ImageCache, *, token: str, receiver: WeightUpdateHandler | None, host: str, **options: Any
    ) -> FastAPI:
        return create_app(SpeakerService(room, pictures, **options), token=token, receiver=receiver, host=host)

    return run_server("speaker", made, description=__doc__, port=9001, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
