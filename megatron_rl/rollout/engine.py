"""Defines the rollout engine interface: token ids and images in, token ids and logprobs out.

Requests contain fully processed inputs: image placeholders are expanded, and the image patches are
the same as in training. The engine returns sampled tokens as ids. Episodes use an engine only
through `InferenceEngine`. colocated.py implements the interface in the trainer's processes and
passes requests to vLLM through vllm/engine_core.py; server_engine.py implements it with vLLM
servers.
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
    """Sampling temperature; 0 decodes greedily."""
    seed: int
    stop: tuple[str, ...] = ()
    """Strings that end the turn. If a stop string occurs, the response includes this string and
    ends with the token that completes it.
    """
    logprob_token_ids: tuple[int, ...] = ()
    """Token ids for which logprobs are returned at every sampled position; vLLM allows up to 128.
    """
    routed_experts_start: int = 0
    """Number of leading tokens of the sequence of which the experts are known already. An engine
    that records experts does not return them again.
    """


@dataclass(slots=True, frozen=True)
class Completion:
    """Tokens sampled for one turn."""

    token_ids: list[int]
    logprobs: list[float]
    """Logprobs of the sampled tokens under the policy. The policy is the model's distribution at
    the sampling temperature, without the banned token ids.
    """
    is_stopped: bool
    """True if the last token is a stop token or completes a stop string; False if max_tokens or
    max_model_len was reached.
    """
    weight_versions: list[int]
    """Weight version with which each token was sampled; versions never decrease within a turn."""
    requested_logprobs: list[list[float]] = field(default_factory=list)
    """Logprobs of the ids in SamplingSettings.logprob_token_ids at each sampled position; empty if
    no ids are requested.
    """
    routed_experts: list[bytes] = field(default_factory=list)
    """Rows of TokenSequence.routed_experts for all tokens but the last sampled one, beginning with
    SamplingSettings.routed_experts_start; empty if the engine does not record experts.
    """


@dataclass(slots=True, frozen=True)
class ResponseSize:
    """Numbers of tokens of a response and of the context that it continues."""

    num_prompt_tokens: int
    num_tokens: int
    is_stopped: bool
    """False if the response was cut off at its token limit."""


@dataclass(slots=True, frozen=True)
class ImageInput:
    """Image in a request: its patches, and the position and number of its placeholder tokens.

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
    """Request for one turn, ready to be passed to the model."""

    id: str
    token_ids: list[int]
    images: list[ImageInput]
    sampling: SamplingSettings


class InferenceEngine(Protocol):
    """Engine interface that episodes use."""

    weight_version: int
    """Version of the current weights."""

    async def generate(self, token_ids: list[int], images: list[Image], sampling: SamplingSettings) -> Completion:
        """Sample one response that continues `token_ids`.

        Raises:
            PermanentInfraError: The engine has failed.
        """
        ...


class RolloutEngine(InferenceEngine, Protocol):
    """Engine that samples from the policy in training and receives its weights from the trainer.

    A colocated engine (colocated.py) runs in the trainer's processes; the engine and the trainer
    take turns using the devices. A server engine (server_engine.py) uses other processes and keeps
    generating while the trainer computes.
    """

    @property
    def busy_s(self) -> float:
        """Total busy time of the engine since its construction, in seconds.

        For a server engine, this is the number of seconds with at least one request in flight,
        averaged over the servers.
        """
        ...

    def run(self, main: Coroutine[object, object, T]) -> T | None:
        """Run `main` to completion; `main` may await `generate`.

        Returns the result of `main` on the engine's leader, and None on the engine's other ranks.

        In a colocated engine, tasks that `main` leaves running are paused until the next `run`. The
        event loop's clock is paused as well. The requests of these tasks keep the tokens sampled so
        far, and the next `run` samples the rest with the weights that are current at that time.
        After `load_weights` or `sleep`, the engine first recomputes the whole sequence of each
        request. If `main` raises, all requests are aborted.
        """
        ...

    def run_alone(self, main: Coroutine[object, object, T]) -> T | None:
        """Run `main` without the engine's other ranks; `main` must not use the engine.

        The other ranks may already have exited.
        """
        ...

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Replace the engine's weights with the (Hugging Face name, tensor) pairs in `tensors`.

        Raises:
            RuntimeError: A received tensor differs from the tensor that was sent. A server engine
                marks the server unhealthy instead of raising an error.
        """
        ...

    def sleep(self) -> None:
        """Free the device for the trainer.

        To restore the engine, call `load_weights` and then `wake`.
        """
        ...

    def wake(self) -> None:
        """Restore the engine on its device; call `load_weights` first."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last `load_weights` call, keyed by metric name."""
        ...

    def close(self) -> None:
        """Close the engine."""
        ...


def placeholder_offsets(token_ids: list[int], images: list[Image], *, image_token_id: int) -> list[int]:
    """Return the index in `token_ids` of each image's first placeholder.

    Example (image_token_id 9, images of 2 and 1 tokens): [5, 9, 9, 6, 9, 7] returns [1, 4].

    Raises:
        RuntimeError: The lengths of the runs of `image_token_id` in `token_ids` differ from the
            token counts of `images`.
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
            f"image placeholders: the sequence has {len(token_ids)} tokens, but needs {len(expanded)} to match its {len(images)} images; "
            f"the first difference is at position {first}"
        )
    return offsets
