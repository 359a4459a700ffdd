"""Defines the rollout engine interface: token ids and images in, token ids and logprobs out.

The input of a request is final: image placeholders are expanded, and the patches are those that the
trainer uses. Sampled tokens are returned as ids. Episodes depend on nothing else of an engine.
colocated.py is the engine in this process; vllm/engine_core.py passes its requests to vLLM.
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
    """Sampling settings of one turn."""

    max_tokens: int
    temperature: float
    """Sampling temperature; 0 is greedy."""
    seed: int
    stop: tuple[str, ...] = ()
    """Stop strings that end the turn. The string and the token that completes it stay in it."""
    logprob_token_ids: tuple[int, ...] = ()
    """Token ids with logprobs requested at every sampled token; vLLM supports at most 128."""


@dataclass(slots=True, frozen=True)
class Completion:
    """Tokens sampled for one turn."""

    token_ids: list[int]
    logprobs: list[float]
    """Logprobs of the sampled tokens under the policy: the model at the sampling temperature with
    the banned ids removed.
    """
    is_stopped: bool
    """True if the last token is a stop id or completes a stop string; False if max_tokens or the
    sequence's limit was reached.
    """
    weight_versions: list[int]
    """Version of the weights that sampled each token; never decreases."""
    requested_logprobs: list[list[float]] = field(default_factory=list)
    """Logprobs of SamplingSettings.logprob_token_ids at each sampled token; empty without any."""


@dataclass(slots=True, frozen=True)
class ImageInput:
    """Image of a request: its patches, and the position and number of its placeholders.

    `patch_PC` is None if the receiver has the patches already.
    """

    key: str
    grid: tuple[int, int, int]
    offset: int
    """Index of the image's first placeholder in Request.token_ids."""
    num_tokens: int
    patch_PC: torch.Tensor | None


@dataclass(slots=True, frozen=True)
class Request:
    """Request for one turn in the form that is sent to the model."""

    id: str
    token_ids: list[int]
    images: list[ImageInput]
    sampling: SamplingSettings


class InferenceEngine(Protocol):
    """Engine interface that episodes use."""

    weight_version: int
    """Version of the weights that are served now."""

    async def generate(self, token_ids: list[int], images: list[Image], sampling: SamplingSettings) -> Completion:
        """Sample one turn after `token_ids`.

        Raises:
            PermanentInfraError: The engine has failed.
        """
        ...


class RolloutEngine(InferenceEngine, Protocol):
    """Engine that samples from the policy in training and receives its weights from the trainer.

    An engine in the trainer's processes (colocated.py) alternates with the trainer on its devices.
    An engine in other processes (server_engine.py) continues while the trainer works.
    """

    busy_s: float
    """Seconds of work since construction. With servers: seconds with a request in flight, averaged
    over the servers.
    """

    def run(self, main: Coroutine[object, object, T]) -> T | None:
        """Run `main`, which may await `generate`, until it ends.

        Returns its result on the engine's leader and None on the engine's other ranks.

        Tasks that `main` leaves behind are paused until the next run of an engine in this process,
        and so is their clock (the event loop's). Their requests are kept: tokens sampled so far
        stay, and the weights served by then sample the rest, after they have recomputed the whole
        sequence. If `main` raises, all requests are aborted.
        """
        ...

    def run_alone(self, main: Coroutine[object, object, T]) -> T | None:
        """Run `main`, which must not use the engine, without the engine's other ranks.

        The other ranks may be gone.
        """
        ...

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Replace the weights, given by their Hugging Face names.

        Raises:
            RuntimeError: A tensor did not arrive as it was sent. A server engine marks the server
                unhealthy instead.
        """
        ...

    def sleep(self) -> None:
        """Free the device for the trainer; `load_weights` and then `wake` restore the engine."""
        ...

    def wake(self) -> None:
        """Take the device back, after `load_weights`."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last `load_weights` by name."""
        ...

    def close(self) -> None:
        """Close the engine."""
        ...


def placeholder_offsets(token_ids: list[int], images: list[Image], *, image_token_id: int) -> list[int]:
    """Return the index of each image's first placeholder.

    Example (image_token_id 9, images of 2 and 1 tokens): [5, 9, 9, 6, 9, 7] gives [1, 4].

    Raises:
        RuntimeError: The runs of `image_token_id` do not have the lengths of `images`, in order.
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
