"""Prompts for the images of a request.

Images that are sent are stored, those named by hash are looked up, and each one is rendered with a
text.
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
    """Limit on rendered images over all requests, which get slots in order of arrival."""

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
    """Store the images of all items and return the items with hashes in place of files.

    All files are stored before any hash is looked up.

    Raises:
        ValueError: An image is not valid base64 or too large.
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
    """Return the SHA-256 of each image, and its prompt: the image followed by the question.

    Raises:
        HTTPException: With status 404 if files were not sent before; its body names them.
        ValueError: An image is invalid.
        InfraError: The server's disk or process failed.
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
