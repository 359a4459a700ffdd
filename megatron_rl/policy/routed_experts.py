"""Experts recorded by the rollout engine, as rows of TokenSequence.routed_experts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.errors import RunFailed
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.types import MicroBatch, Rollout, TokenSequence


@dataclass(slots=True, frozen=True, kw_only=True)
class RoutingFormat:
    r"""Format of a row of TokenSequence.routed_experts.

    A row contains the experts of a token, as little-endian integers of one byte, or of two bytes if
    there are more than 256 experts. Example: a model with three layers, of which two are sparse,
    and with top_k 2. If a token is computed by the experts 5 and 0 in the first sparse layer, and
    by 3 and 7 in the second, the row is b"\x05\x00\x03\x07".
    """

    num_layers: int
    """Number of sparse layers."""
    top_k: int
    """Number of experts that compute each token."""
    num_experts: int
    """Number of experts of a sparse layer."""

    @classmethod
    def from_spec(cls, spec: ModelSpec) -> "RoutingFormat":
        """Return the format for a model, which must have experts."""
        assert spec.experts is not None
        return cls(num_layers=sum(spec.experts.sparse_layers), top_k=spec.experts.top_k, num_experts=spec.experts.num_experts)

    @property
    def dtype(self) -> np.dtype:
        """Type of the integers of a row. int16 instead of uint16, because torch indexes with it."""
        return np.dtype("u1" if self.num_experts <= 256 else "<i2")

    def decode(self, rows: Sequence[bytes], label: str) -> np.ndarray:
        """Return rows as an integer array [rows, layers, top_k].

        Raises:
            RunFailed: A row has a wrong size, an expert that does not exist, or an expert twice in
                a layer. The message starts with `label`.
        """
        size = self.num_layers * self.top_k * self.dtype.itemsize
        wrong = next((row for row in rows if len(row) != size), None)
        if wrong is not None:
            expected = f"{self.num_layers} sparse layers and {self.top_k} experts per token have {size}"
            raise RunFailed(f"{label}: routed_experts has a row of {len(wrong)} bytes, but {expected}; was it recorded with another model?")
        experts = np.frombuffer(b"".join(rows), self.dtype).reshape(len(rows), self.num_layers, self.top_k)
        ordered = np.sort(experts, -1)
        if experts.size and (ordered[..., 0].min() < 0 or ordered[..., -1].max() >= self.num_experts):
            raise RunFailed(f"{label}: routed_experts has expert {ordered.max()}, but the model has experts 0 to {self.num_experts - 1}")
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise RunFailed(f"{label}: routed_experts has the same expert twice for a token")
        return experts


def require_routed_experts(rollouts: Iterable[Rollout]) -> None:
    """Raise RunFailed if a sequence to train on lacks experts that its logprobs depend on.

    These are the experts of all tokens before the last sampled one. The engine has not computed the
    last sampled token, which is no input of a logprob.
    """
    for rollout in rollouts:
        for number, context in enumerate(rollout.sequences if rollout.is_trained_on else []):
            num_needed = last_sampled(context)
            if len(context.routed_experts) < num_needed:
                raise RunFailed(
                    f"algo.routing_replay=rollout: {rollout_label(rollout, number)} has the experts of {len(context.routed_experts)} of "
                    f"{num_needed} tokens; use rollouts of a run with this setting, or algo.routing_replay=none"
                )


def last_sampled(context: TokenSequence) -> int:
    """Return the index of the last sampled token; 0 if no token was sampled."""
    return max((place for place, is_sampled in enumerate(context.loss_mask) if is_sampled), default=0)


def rollout_label(rollout: Rollout, sequence: int) -> str:
    """Return the name of a sequence for messages."""
    return f"sequence {sequence} of rollout {rollout.sample_index} of example {rollout.example_id}"


def gather_routed_experts(rollouts: Sequence[Rollout], batch: MicroBatch, routing: RoutingFormat) -> torch.Tensor:
    """Return MicroBatch.routed_experts_TLK for a micro-batch of these rollouts.

    Rows of padding, and of tokens without recorded experts, are 0. Raises RunFailed if a sequence
    has invalid experts.
    """
    experts_TLK = np.zeros((batch.num_tokens, routing.num_layers, routing.top_k), routing.dtype)
    for origin, first, last in zip(batch.origin_S, batch.offset_S1[:-1], batch.offset_S1[1:], strict=True):
        if origin is not None:
            rollout = rollouts[origin.rollout]
            rows = rollout.sequences[origin.sequence].routed_experts[origin.start : origin.start + last - first]
            experts_TLK[first : first + len(rows)] = routing.decode(rows, rollout_label(rollout, origin.sequence))
    return torch.from_numpy(experts_TLK).to(batch.token_T.device)
