r"""HTTP server of the Lewis speaker, which describes an image so that a listener can identify it.

    python -m megatron_rl.tasks.lewis.server.speaker_app --model runs/speaker/final \
        --root data/lewis --port 9001

    POST /describe          {"image": an image, "category": "mug"}
                       or   {"image_path": path, "category": ..., "situation": true}
    POST /batch_describe    {"batch": [the same, ...]}
    -> {"results": [{"thinking", "coarse", "detailed", "state", "location", "text"}], "took": s,
        "version": v}, one result per image
    POST /weights           with --trained, from the run that trains the speaker (weight_updates.py)
    GET  /health /metrics

An image is a path below the server's roots, a base64-encoded image file, or the SHA-256 of a file
that was sent before. If the field `situation` of a request is true, the prompt also asks for the
object's state and location. Replies are decoded greedily and parsed as in
tasks/lewis/description.py; missing parts are empty strings. HTTP status codes have the same meaning
as in listener_app.py.
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
from megatron_rl_sandbox.http import make_retry_error, openapi_body, read_body, run_while_connected

if TYPE_CHECKING:  # imports torch
    from megatron_rl.tasks.lewis.server.engine_holder import EngineHolder

MAX_REPLY_TOKENS = 512
"""Maximum number of tokens in a reply."""


class DescribeItem(StrictMessage):
    """Request to describe one image, with the category of the object in the image."""

    image: CandidateImage | None = None
    image_path: Annotated[str, StringConstraints(max_length=4096)] = ""
    category: Annotated[str, StringConstraints(min_length=1, max_length=200)] = "object"
    situation: bool = False
    """If True, the game's longer prompt is used, which also asks for the object's state and
    location."""

    @model_validator(mode="after")
    def _check_single_source(self) -> Self:
        if (self.image is None) == (not self.image_path):
            raise ValueError("an item must have either image or image_path, not both")
        return self

    @property
    def candidate(self) -> CandidateImage:
        """Image to describe."""
        return self.image or CandidateImage(path=self.image_path)

    @property
    def prompt(self) -> str:
        """Text that follows the image in the prompt."""
        words = PROMPT.format(category=self.category)
        return f"{words} {SITUATION_PROMPT}" if self.situation else words

    @property
    def stop_text(self) -> str:
        """String that ends the generation of the reply."""
        return "</location>" if self.situation else "</detailed>"


class DescribeBatch(StrictMessage):
    """Body of /batch_describe."""

    batch: Annotated[list[DescribeItem], Field(min_length=1, max_length=MAX_ITEMS)]


class DescriptionResult(StrictMessage):
    """Full text of a reply and the parts parsed from it."""

    thinking: str
    coarse: str
    detailed: str
    state: str
    location: str
    text: str
    """Full text of the reply."""


class DescribeResponse(DescriptionResult):
    """Response to /describe."""

    took: float
    version: str


class DescribeBatchResponse(StrictMessage):
    """Response to /batch_describe."""

    results: list[DescriptionResult]
    took: float
    version: str


class SpeakerService:
    """Request handlers of the speaker server."""

    def __init__(
        self, engine: "EngineHolder", image_cache: ImageCache, *, limits: RequestLimits, name: str, log: Path | None = None
    ) -> None:
        self.engine, self.image_cache, self.name = engine, image_cache, name
        self._render_slots = RenderSlots(engine.settings.max_num_seqs)
        """Slots for images that are being rendered or described, shared by all requests. The number
        of slots is the engine's batch size. A rendered image takes up to 14 MB.
        """
        self.limiter = RequestLimiter("speaker", limits, busy_s=lambda: engine.busy_s, log=log)

    async def describe(self, request: Request) -> DescribeResponse:
        """Describe one image, for POST /describe."""
        began = time.perf_counter()
        (said,), version = await run_while_connected(request, self._describe_items([await read_body(request, DescribeItem)]))
        return DescribeResponse(**said.model_dump(), took=time.perf_counter() - began, version=version)

    async def batch_describe(self, request: Request) -> DescribeBatchResponse:
        """Describe several images, for POST /batch_describe."""
        began = time.perf_counter()
        results, version = await run_while_connected(request, self._describe_items((await read_body(request, DescribeBatch)).batch))
        return DescribeBatchResponse(results=results, took=time.perf_counter() - began, version=version)

    async def _describe_items(self, items: Sequence[DescribeItem]) -> tuple[list[DescriptionResult], str]:
        """Return the descriptions of the items, and the version of the weights."""
        async with self.limiter.admit(), self.engine.hold_weights() as version:
            shown = await store_candidates(self.engine, self.image_cache, [[item.candidate] for item in items])
            tasks = [
                asyncio.create_task(self._generate_reply(each, items[number], where=f"item {number}")) for number, each in enumerate(shown)
            ]
            try:
                replies = await asyncio.gather(*tasks)
            finally:
                for task in tasks:  # if one failed, cancel the others
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
            raise InfraError("the model returned no response")
        return self.engine.renderer.decode_response(completion.token_ids)

    async def health(self) -> dict[str, Any]:
        """Return the server's status, name, version and limits, for GET /health."""
        if not self.engine.is_healthy:
            raise make_retry_error(503, "the engine has failed; restart the server")
        return {"status": "ok", "name": self.name, "version": self.engine.version, "limits": self.limiter.limits.to_json()}


def _parse_reply(reply: str, *, category: str) -> DescriptionResult:
    said = parse_description(reply, category=category)
    return DescriptionResult(
        thinking=said.thinking, coarse=said.coarse, detailed=said.detailed, state=said.state, location=said.location, text=reply
    )  # fmt: skip


def create_app(service: SpeakerService, *, token: str = "", receiver: WeightUpdateHandler | None = None, host: str = "") -> FastAPI:
    """Return the FastAPI application with the routes of the speaker."""
    bodies, limits = ("describe", "batch_describe"), service.limiter.limits
    app = make_application("speaker", limits=limits, large_body_routes=bodies, token=token, receiver=receiver, host=host)
    app.post("/describe", openapi_extra=openapi_body(DescribeItem))(service.describe)
    app.post("/batch_describe", openapi_extra=openapi_body(DescribeBatch))(service.batch_describe)
    app.get("/health")(service.health)
    app.get("/metrics")(service.limiter.metrics)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server and return its exit status."""

    def made(
        room: "EngineHolder", pictures: ImageCache, *, token: str, receiver: WeightUpdateHandler | None, host: str, **options: Any
    ) -> FastAPI:
        return create_app(SpeakerService(room, pictures, **options), token=token, receiver=receiver, host=host)

    return run_server("speaker", made, description=__doc__, port=9001, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
