"""Live rollout engine that computes the logprob of each sampled token in a recorded sequence.

Each sampled token requires one request, which generates a single token. The engine's prefix cache
shares the common prefixes of these requests. As in a run, every process has an engine, or a shard
of an engine that spans settings.tp adjacent ranks. Only the first engine receives requests; the
other engines stay idle.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist

from megatron_rl.config import EngineSettings
from megatron_rl.distributed.world import World
from megatron_rl.explain.recorded_step import RecordedSequence
from megatron_rl.explain.sequence_checks import ImageToPatches
from megatron_rl.rollout.colocated import ColocatedEngine
from megatron_rl.rollout.engine import SamplingSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Image
from megatron_rl.weights.formats.checkpoint_source import TensorSource, iterate_tensors


class LiveEngine:
    """Rollout engine of this process, or this process's shard of an engine, with loaded weights.

    All ranks create the engine together.
    """

    def __init__(
        self, model_path: str, settings: EngineSettings, renderer: Renderer, source: TensorSource, *, patches: ImageToPatches, world: World
    ) -> None:  # fmt: skip
        self._patches, self._image_token_id = patches, renderer.image_token_id
        self._is_first, group = world.rank < settings.tp, None
        if settings.tp > 1:
            firsts = range(0, world.size, settings.tp)
            groups = [dist.new_group(list(range(first, first + settings.tp)), backend="gloo") for first in firsts]
            group = cast(dist.ProcessGroup, groups[world.rank // settings.tp])  # this rank is a member
        self._engine = ColocatedEngine(
            model_path, settings, special_tokens=renderer.special_tokens,
            group=group, pixels=renderer.final_pixels, reads_weights=False,
        )  # fmt: skip
        self._engine.load_weights(iterate_tensors(source), version=0)

    def compute_logprobs(self, sequences: Sequence[RecordedSequence], *, temperature: float) -> list[torch.Tensor]:
        """Return the float64 logprobs [R] of each sequence's sampled tokens.

        The result is complete on the main rank, and empty on ranks that are not part of the first
        engine.
        """
        if not self._is_first:
            return []

        async def everything() -> list[list[float]]:
            return [
                await asyncio.gather(*(self._score_token(*each, temperature) for each in self._token_requests(one))) for one in sequences
            ]

        return [torch.tensor(said, dtype=torch.float64) for said in self._engine.run(everything()) or []]

    def close(self) -> None:
        """Shut down the engine.

        `close` must be the last call in a process, because vLLM also destroys the default process
        group.
        """
        self._engine.close()

    async def _score_token(self, token_ids: list[int], images: list[Image], temperature: float) -> float:
        """Return the logprob of the last token, given the tokens before it."""
        *before, token = token_ids
        sampling = SamplingSettings(max_tokens=1, temperature=temperature, seed=0, logprob_token_ids=(token,))
        return (await self._engine.generate(before, images, sampling)).requested_logprobs[0][0]

    def _token_requests(self, sequence: RecordedSequence) -> Iterator[tuple[list[int], list[Image]]]:
        """Yield one request per sampled token.

        A request consists of all tokens up to and including the sampled token, and of the images
        whose placeholders are among these tokens.
        """
        ids, images = sequence.tokens.token_ids, [replace(each, patch_PC=self._patches(each)) for each in sequence.tokens.images]
        for row in sequence.sampled_rows:
            num, shown = sum(token == self._image_token_id for token in ids[: row + 1]), []
            for image in images:
                if num <= 0:
                    break
                num -= image.num_tokens
                shown.append(image)
            yield ids[: row + 2], shown
