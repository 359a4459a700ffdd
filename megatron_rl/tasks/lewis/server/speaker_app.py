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
from megatron_rl.tasks.lewis.description import PROMPT, SITUATION, described
from megatron_rl.tasks.lewis.listener_protocol import MOST_ITEMS, Candidate, Strict
from megatron_rl.tasks.lewis.server.image_cache import Pictures
from megatron_rl.tasks.lewis.server.model_server import application, run_server
from megatron_rl.tasks.lewis.server.prompt_renderer import Places, prompts, taken
from megatron_rl.tasks.lewis.server.request_limiter import Admission, Limits
from megatron_rl.tasks.lewis.server.weight_updates import Receiver
from sandbox.http import busy, documented, read, while_connected

if TYPE_CHECKING:  # it brings torch
    from megatron_rl.tasks.lewis.server.engine_holder import EngineRoom

MOST_TOKENS = 512
"""Of a reply."""


class Shown(Strict):
    """A picture, and what kind of thing it shows."""

    image: Candidate | None = None
    image_path: Annotated[str, StringConstraints(max_length=4096)] = ""
    category: Annotated[str, StringConstraints(min_length=1, max_length=200)] = "object"
    situation: bool = False
    """Ask for state and location, too, by the game's longer prompt."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.image is None) == (not self.image_path):
            raise ValueError("an item has image or image_path, and not both")
        return self

    @property
    def picture(self) -> Candidate:
        return self.image or Candidate(path=self.image_path)

    @property
    def words(self) -> str:
        words = PROMPT.format(category=self.category)
        return f"{words} {SITUATION}" if self.situation else words

    @property
    def end(self) -> str:
        """Of a reply."""
        return "</location>" if self.situation else "</detailed>"


class ShownBatch(Strict):
    batch: Annotated[list[Shown], Field(min_length=1, max_length=MOST_ITEMS)]


class Said(Strict):
    thinking: str
    coarse: str
    detailed: str
    state: str
    location: str
    text: str
    """All of the reply."""


class Described(Said):
    took: float
    version: str


class DescribedBatch(Strict):
    results: list[Said]
    took: float
    version: str


class Speaker:
    """What the routes do."""

    def __init__(self, room: "EngineRoom", pictures: Pictures, *, limits: Limits, name: str, log: Path | None = None) -> None:
        self.room, self.pictures, self.name = room, pictures, name
        self._places = Places(room.settings.max_num_seqs)
        """Pictures, of all requests together, that are rendered or described: as many as the engine answers at a time. One that is rendered
        takes up to 14 MB."""
        self.admission = Admission("speaker", limits, busy_s=lambda: room.busy_s, log=log)

    async def describe(self, request: Request) -> Described:
        began = time.perf_counter()
        (said,), version = await while_connected(request, self._said([await read(request, Shown)]))
        return Described(**said.model_dump(), took=time.perf_counter() - began, version=version)

    async def batch_describe(self, request: Request) -> DescribedBatch:
        began = time.perf_counter()
        results, version = await while_connected(request, self._said((await read(request, ShownBatch)).batch))
        return DescribedBatch(results=results, took=time.perf_counter() - began, version=version)

    async def _said(self, items: Sequence[Shown]) -> tuple[list[Said], str]:
        """And the version of the weights that they are by."""
        async with self.admission.admitted(), self.room.steady() as version:
            shown = await taken(self.room, self.pictures, [[item.picture] for item in items])
            tasks = [asyncio.create_task(self._reply(each, items[number], where=f"item {number}")) for number, each in enumerate(shown)]
            try:
                replies = await asyncio.gather(*tasks)
            finally:
                for task in tasks:  # the others, where one has failed
                    task.cancel()
        results = [_said_in(reply, category=item.category) for reply, item in zip(replies, items, strict=True)]
        self.admission.count(items=len(items), pictures=len(items))
        told = [{"category": item.category, **said.model_dump()} for item, said in zip(items, results, strict=True)]
        self.admission.write(told, version=version)
        return results, version

    async def _reply(self, shown: Sequence[Candidate], item: Shown, *, where: str) -> str:
        sampling = SamplingSettings(max_tokens=MOST_TOKENS, temperature=0.0, seed=0, stop=(item.end,))
        async with self._places.held(1):
            ((_, context),) = await prompts(self.room, self.pictures, shown, item.words, where=where)
            completion = await self.room.generate(context, sampling)
        if not completion.token_ids:
            raise InfraError("the model gave no reply")
        return self.room.renderer.text(completion.token_ids)

    async def health(self) -> dict[str, Any]:
        if not self.room.is_well:
            raise busy(503, "the engine has failed; start the server anew")
        return {"status": "ok", "name": self.name, "version": self.room.version, "limits": self.admission.limits.told()}


def _said_in(reply: str, *, category: str) -> Said:
    said = described(reply, category=category)
    return Said(
        thinking=said.thinking, coarse=said.coarse, detailed=said.detailed, state=said.state, location=said.location, text=reply
    )  # fmt: skip


def create_app(speaker: Speaker, *, token: str = "", receiver: Receiver | None = None, host: str = "") -> FastAPI:
    bodies, limits = ("describe", "batch_describe"), speaker.admission.limits
    app = application("speaker", limits=limits, bodies=bodies, token=token, receiver=receiver, host=host)
    app.post("/describe", openapi_extra=documented(Shown))(speaker.describe)
    app.post("/batch_describe", openapi_extra=documented(ShownBatch))(speaker.batch_describe)
    app.get("/health")(speaker.health)
    app.get("/metrics")(speaker.admission.metrics)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    def made(room: "EngineRoom", pictures: Pictures, *, token: str, receiver: Receiver | None, host: str, **options: Any) -> FastAPI:
        return create_app(Speaker(room, pictures, **options), token=token, receiver=receiver, host=host)

    return run_server("speaker", made, description=__doc__, port=9001, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
