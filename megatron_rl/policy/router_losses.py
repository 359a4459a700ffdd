"""Load-balancing loss and z loss of the routers of a model with experts.

docs/algorithm.md (Losses of the routers) states the formulas. Both losses are means over all tokens
of the update's sequences. A prompt that several sequences share is computed once and counts once
for each of them, and padding does not count. The losses therefore do not depend on how the update
is packed and divided among ranks.

The share of tokens of each expert is a constant of the load-balancing loss. It is that of the whole
update, which is not known while the first micro-batch is computed. A forward pass over the update
therefore counts the experts' tokens first. Megatron's own losses (megatron-core 0.16.1,
transformer/moe/router.py) are not used: their shares are those of one micro-batch, and their scale
assumes that all micro-batches have the same number of tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import nn

from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.policy.parallel import Layout
from megatron_rl.policy.routing_replay import hook_sparse_layers
from megatron_rl.types import MicroBatch

METRICS = ("router/aux_loss", "router/z_loss")


@dataclass(slots=True, eq=False)
class UpdateStatistics:
    """Numbers of one update that its micro-batches have in common."""

    coef_2: torch.Tensor
    """Coefficients of the load-balancing loss and of the z loss."""
    count_LE: torch.Tensor
    """int64 number of tokens that each expert of each sparse layer computes in the whole update.
    Layers of other pipeline stages are included.
    """
    num_tokens: torch.Tensor
    """Number of tokens of all sequences of the update."""
    denominator: torch.Tensor
    """Sum of MicroBatch.denominator over the update, by which all gradients are divided."""
    sum_2: torch.Tensor
    """Both losses, summed over this rank's layers and tokens."""
    is_counting: bool = True
    """True during the pass that computes count_LE."""


@dataclass(slots=True, frozen=True, eq=False)
class BatchWeights:
    """Tokens of one micro-batch on this tensor-parallel rank, and the statistics of its update."""

    update: UpdateStatistics
    weight_T: torch.Tensor
    """Number of sequences that contain each token, int64; 0 for padding."""


@dataclass(slots=True, frozen=True, eq=False)
class LayerLosses:
    """Losses of the router of one sparse layer for one micro-batch."""

    batch: BatchWeights
    layer: int
    """Index of the layer among all sparse layers of the model."""

    def attach(self, prob_TE: torch.Tensor, logit_TE: torch.Tensor, is_used_TE: torch.Tensor) -> torch.Tensor:
        """Return `prob_TE`; in the backward pass, it adds the gradients of both losses.

        Args:
            prob_TE: Weights of the experts, the router's output.
            logit_TE: float32 logits of the router.
            is_used_TE: True for the experts that compute the token.
        """
        update, weight_T = self.batch.update, self.batch.weight_T
        if update.is_counting:
            update.count_LE[self.layer] += (is_used_TE * weight_T[:, None]).sum(0)
            return prob_TE
        if not torch.is_grad_enabled():  # the pass before recomputation
            return prob_TE
        num_layers, num_experts = update.count_LE.shape
        share_E = (update.count_LE[self.layer] / update.num_tokens).float()
        balance_T = num_experts * (logit_TE.softmax(-1) @ share_E)
        losses_2 = torch.stack([weight_T.float() @ balance_T, weight_T.float() @ logit_TE.logsumexp(-1).square()])
        losses_2 = losses_2 / (num_layers * update.num_tokens)
        update.sum_2 += losses_2.detach()
        return MoEAuxLossAutoScaler.apply(prob_TE, update.denominator * (update.coef_2 * losses_2).sum())


class RouterLosses:
    """Adds the losses of the routers to the updates of one model on this rank."""

    def __init__(self, chunks: nn.ModuleList, spec: ModelSpec, layout: Layout, coefs: Sequence[float]) -> None:
        """Register hooks on the sparse layers of the chunks.

        Args:
            chunks: Model chunks of this rank (ModelChunk), in the order of the virtual pipeline.
            spec: Specification of the model, which must have experts.
            layout: Parallel layout of the model.
            coefs: Coefficients of the load-balancing loss and of the z loss.
        """
        assert spec.experts is not None
        self._layout, self._coefs, self._update = layout, tuple(coefs), cast("UpdateStatistics | None", None)
        self._device = next(chunks.parameters()).device
        self._size = (sum(spec.experts.sparse_layers), spec.experts.num_experts)
        for chunk in cast("Any", chunks):
            chunk.start_router_losses = self._start
        hook_sparse_layers(chunks, spec, layout, _set_losses)

    @contextmanager
    def added_to(self, batches: list[MicroBatch], forward: Callable[[list[MicroBatch]], object]) -> Iterator[None]:
        """Add the losses to the training passes over these micro-batches in the block.

        All ranks must enter together. `forward` runs a forward pass over the micro-batches, which a
        load-balancing loss needs first.
        """
        self._update = self._begin(batches)
        try:
            if self._coefs[0]:
                forward(batches)
                dist.all_reduce(self._update.count_LE)
            self._update.is_counting = False
            yield
        finally:
            last, self._update = self._update, None
        dist.all_reduce(last.sum_2)
        self._last = last

    def metrics(self) -> dict[str, float]:
        """Return the losses of the last update, without their coefficients, before its step."""
        return {name: value for name, value, coef in zip(METRICS, self._last.sum_2.tolist(), self._coefs, strict=True) if coef}

    def _begin(self, batches: list[MicroBatch]) -> UpdateStatistics:
        """Return the statistics of an update, with the numbers of tokens of all ranks."""
        tokens = sum(num * (last - first) for batch in batches for num, first, last in _segments(batch))
        is_first = self._layout.tp_rank == 0 and self._layout.is_first_stage  # others have the same micro-batches
        totals = (tokens, sum(batch.denominator for batch in batches)) if is_first else (0, 0)
        total_2 = torch.tensor(totals, dtype=torch.float64, device=self._device)
        dist.all_reduce(total_2)
        return UpdateStatistics(
            coef_2=torch.tensor(self._coefs, device=self._device),
            count_LE=torch.zeros(self._size, dtype=torch.int64, device=self._device),
            num_tokens=total_2[0].clamp(min=1),
            denominator=total_2[1],
            sum_2=torch.zeros(2, dtype=torch.float64, device=self._device),
        )

    def _start(self, batch: MicroBatch) -> BatchWeights | None:
        """Return the tokens of a pass of a micro-batch; None if no losses are added to the pass."""
        if self._update is None:
            return None
        tp = self._layout.tp if self._layout.sequence_parallel else 1
        rank, num = self._layout.tp_rank if tp > 1 else 0, batch.num_tokens // tp
        weights = [num_sequences for num_sequences, first, last in _segments(batch) for _ in range(first, last)]
        own = torch.tensor(weights[rank * num : (rank + 1) * num], dtype=torch.int64)
        return BatchWeights(self._update, own.to(batch.token_T.device))


def _segments(batch: MicroBatch) -> Iterator[tuple[int, int, int]]:
    """Yield, for each segment, the number of sequences that contain it, its start and its end."""
    yield from zip(batch.num_sequences_S, batch.offset_S1[:-1], batch.offset_S1[1:], strict=True)


def _set_losses(sparse_index: int, layer: nn.Module, _inputs: tuple, kwargs: dict) -> None:
    """Set the losses of the layer's router; a forward pre-hook of a sparse layer."""
    batch: BatchWeights | None = kwargs["packed_seq_params"].router_losses
    cast("Any", layer).mlp.router.losses = None if batch is None else LayerLosses(batch, sparse_index)
