"""Prompts of the pictures that a request names: what is sent is kept, what is asked for by its hash is found, each is shown with words."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from fastapi import HTTPException

from megatron_rl.tasks.lewis.listener_protocol import CandidateImage
from megatron_rl.tasks.lewis.server.image_cache import ImageCache, UnknownImage
from megatron_rl.types import TokenSequence

if TYPE_CHECKING:  # it brings torch
    from megatron_rl.tasks.lewis.server.engine_holder import EngineHolder


class RenderSlots:
    """Places for rendered pictures, of all requests together. Requests get theirs in the order in which they ask."""

    def __init__(self, num: int) -> None:
        self._semaphore, self._lock = asyncio.Semaphore(num), asyncio.Lock()

    @asynccontextmanager
    async def acquire(self, num: int) -> AsyncIterator[None]:
        """Wait for so many places, and give them back at the end of the block. There must be as many."""
        got = 0
        try:
            async with self._lock:
                while got < num:
                    await self._semaphore.acquire()
                    got += 1
            yield
        finally:
            for _ in range(got):
                self._semaphore.release()


async def store_candidates(
    engine: "EngineHolder", image_cache: ImageCache, candidates: Sequence[Sequence[CandidateImage]]
) -> list[list[CandidateImage]]:
    """The pictures of all items, those that came as files by their hashes: they are kept before any is asked for.

    ValueError: one is none.
    """

    def take() -> list[list[CandidateImage]]:
        return [
            [image_cache.store_candidate(each, where=f"item {number}: candidate {index}") for index, each in enumerate(shown)]
            for number, shown in enumerate(candidates)
        ]

    return await engine.run_in_renderer(take)


async def render_prompts(
    engine: "EngineHolder", image_cache: ImageCache, candidates: Sequence[CandidateImage], question: str, *, where: str
) -> list[tuple[str, TokenSequence]]:
    """Of each picture its SHA-256, and the prompt that shows it with the words behind it.

    HTTPException 404: files that were not sent. ValueError: a picture is none. InfraError: its disk.
    """

    def prompt(index: int) -> tuple[str, TokenSequence] | UnknownImage:
        try:
            digest, picture = image_cache.read_image(candidates[index], where=f"{where}: candidate {index}")
        except UnknownImage as unknown:
            return unknown
        parts = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
        return digest, engine.renderer.prompt([{"role": "user", "content": parts}])

    found = await asyncio.gather(*(engine.run_in_renderer(partial(prompt, index)) for index in range(len(candidates))))
    unknown = [each.args[0] for each in found if isinstance(each, UnknownImage)]
    if unknown:
        raise HTTPException(404, {"unknown": unknown, "what": "no file of these hashes is here; send them as base64"})
    return list(found)
