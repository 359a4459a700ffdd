"""Renders one prompt for each image of a request.

Image files in the request are stored in the image cache. Images that are given by hash are looked
up in the cache. Then each image is rendered together with a text.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from fastapi import HTTPException

from megatron_rl.tasks.lewis.listener_protocol import CandidateImage
from megatron_rl.tasks.lewis.server.image_cache import ImageCache, UnknownImage
from megatron_rl.types import TokenSequence

if TYPE_CHECKING:  # imports torch
    from megatron_rl.tasks.lewis.server.engine_holder import EngineHolder


class RenderSlots:
    """Limits the total number of rendered images that requests keep in memory at a time.

    Requests get slots in the order of their arrival.
    """

    def __init__(self, num: int) -> None:
        self._semaphore, self._lock = asyncio.Semaphore(num), asyncio.Lock()

    @asynccontextmanager
    async def acquire(self, num: int) -> AsyncIterator[None]:
        """Wait for `num` slots and release them at the end of the block.

        `num` must not exceed the total number of slots.
        """
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
    """Store the images of all items in the cache and return the items with hashes instead of files.

    All files are stored before any hash is looked up, so a hash may refer to a file in the same
    request.

    Raises:
        ValueError: The base64 encoding of an image is invalid, or an image is too large.
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
    """Return the SHA-256 and the prompt of each image.

    A prompt is the image followed by the question.

    Raises:
        HTTPException: Status 404 if files are not in the cache. The body lists the hashes of the
            missing files.
        ValueError: An image is invalid.
        InfraError: Reading failed because of the server's disk or process.
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
        raise HTTPException(404, {"unknown": unknown, "what": "no cached files have these hashes; send the files as base64"})
    return [each for each in found if not isinstance(each, UnknownImage)]
