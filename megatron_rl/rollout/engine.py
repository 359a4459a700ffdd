"""What an engine is: token ids and images in, sampled token ids with their logprobs out. Episodes know this much of it and no more.

Token in, token out: a request's ids are final (image placeholders are expanded), its patches are those that the trainer sees, and what was
sampled comes back as ids. colocated.py is the engine in this process; its requests to vLLM are vllm/engine_core.py's.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    import torch

    from megatron_rl.types import Image

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class SamplingSettings:
    max_tokens: int
    temperature: float
    """0 is greedy."""
    seed: int
    stop: tuple[str, ...] = ()
    """Texts that end the turn. They and the token that completed one stay in it."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens whose logprobs are wanted wherever one is sampled; vLLM tells of 128 at most."""


@dataclass(slots=True, frozen=True)
class Completion:
    token_ids: list[int]
    logprobs: list[float]
    """Logprobs of the sampled tokens under the policy: the model at the sampling temperature with the banned ids removed."""
    is_stopped: bool
    """True: the last of token_ids is a stop id or completes a stop text. False: max_tokens or the context ran out."""
    weight_versions: list[int]
    """Version of the weights that sampled each token; they never go down."""
    requested_logprobs: list[list[float]] = field(default_factory=list)
    """For each sampled token the logprobs of SamplingSettings.logprob_token_ids in its place; empty where none were asked."""


@dataclass(slots=True, frozen=True)
class ImageInput:
    """An image in a context: where its placeholders begin and how many they are, its patches unless the receiver has them already."""

    key: str
    grid: tuple[int, int, int]
    offset: int
    num_tokens: int
    patch_PC: torch.Tensor | None


@dataclass(slots=True, frozen=True)
class Request:
    """One turn to be sampled, as it travels to the model that samples it."""

    id: str
    token_ids: list[int]
    images: list[ImageInput]
    sampling: SamplingSettings


class InferenceEngine(Protocol):
    """What an episode talks to."""

    weight_version: int
    """Version of the weights that are served now."""

    async def generate(self, token_ids: list[int], images: list[Image], sampling: SamplingSettings) -> Completion:
        """Sample one turn after `token_ids`. Raises PermanentInfraError when the engine has failed."""
        ...


class RolloutEngine(InferenceEngine, Protocol):
    """An engine that samples what is trained: the trainer hands its weights over. One in the trainer's processes (colocated.py) uses the
    trainer's devices in turn with it; one elsewhere (server_engine.py) goes on meanwhile."""

    busy_s: float
    """Seconds of work since construction; of servers elsewhere the mean of those in which each had something under way."""

    def run(self, main: Coroutine[object, object, T]) -> T | None:
        """Run `main`, which may await `generate`, to its end. Its result on the engine's leader, None on its other ranks.

        Tasks that `main` leaves behind stand still until the next run of an engine in this process, as does their clock (the event loop's).
        What they ask is kept: tokens that were sampled stay, and what follows is sampled by the weights that are served by then, which
        compute the whole context anew. Where `main` raises, all that was asked is given up.
        """
        ...

    def run_alone(self, main: Coroutine[object, object, T]) -> T | None:
        """Run `main`, which asks nothing of the engine, without the engine's other ranks, which may be gone."""
        ...

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Replace the weights, by Hugging Face's names. Raises RuntimeError unless every tensor has arrived as it was sent."""
        ...

    def sleep(self) -> None:
        """Leave the device to the trainer; load_weights and then wake bring the engine back."""
        ...

    def wake(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        """Metrics of the last load_weights, by name."""
        ...

    def close(self) -> None: ...


def placeholder_offsets(token_ids: list[int], images: list[Image], *, image_token_id: int) -> list[int]:
    """Where each image's placeholders begin. Raises RuntimeError unless the runs of image_token_id have the images' lengths, in order.

    Example (image_token_id 9, images of 2 and 1 tokens): [5, 9, 9, 6, 9, 7] gives [1, 4].
    """
    offsets: list[int] = []
    expanded: list[int] = []
    position = 0
    for image in images:
        start = token_ids.index(image_token_id, position) if image_token_id in token_ids[position:] else len(token_ids)
        offsets.append(start)
        expanded += token_ids[position:start] + [image_token_id] * image.num_tokens
        position = start
        while position < len(token_ids) and token_ids[position] == image_token_id:
            position += 1
    expanded += [token for token in token_ids[position:] if token != image_token_id]
    if expanded != token_ids:
        first = next(i for i, (given, own) in enumerate(itertools.zip_longest(token_ids, expanded)) if given != own)
        raise RuntimeError(
            f"image placeholders: the context has {len(token_ids)} tokens, but {len(expanded)} when its {len(images)} images are expanded; "
            f"they first differ at position {first}"
        )
    return offsets
