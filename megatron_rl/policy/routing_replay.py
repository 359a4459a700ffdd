"""Routing replay: a forward pass computes each token with the experts of an earlier pass.

The routers use the experts in MicroBatch.routed_experts_TLK. The weights of these experts are
computed from the current logits, so the gradient reaches the router. The experts come from the
rollout engine (R3, arXiv 2510.11370) or from the forward pass that computes the old logprobs (R2,
arXiv 2507.18071).

Megatron's router calls `get_replay_topk` of its attribute `router_replay` (megatron-core 0.16.1,
transformer/moe/moe_utils.py, topk_routing_with_score_function). Megatron's own class for this
attribute (router_replay.py) has one list for all models of a process, in the order of construction,
and replays recomputed layers from a queue. Here, a hook assigns the micro-batch's experts to the
router whenever a layer is called. Several models, interleaved micro-batches and recomputation in
the backward pass therefore need no order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.policy.parallel import Layout
from megatron_rl.types import MicroBatch

TopkFn = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Megatron's selection (scores [T, E], top_k, ...) -> values [T, K] and indices [T, K]."""


def has_experts(experts_TK: torch.Tensor) -> torch.Tensor:
    """Return a bool tensor [...], False for a row [..., K] of equal numbers.

    A token has at least two distinct experts. A row of equal numbers thus stands for no experts.
    """
    return (experts_TK != experts_TK[..., :1]).any(-1)


@dataclass(slots=True, eq=False)
class BatchRouting:
    """Experts of one micro-batch for the tokens of this tensor-parallel rank."""

    experts_TLK: torch.Tensor
    """View of MicroBatch.routed_experts_TLK."""
    is_recording: bool
    """True if the pass writes its own choices to experts_TLK; False if it replays them."""
    differs_T: dict[int, torch.Tensor] = field(default_factory=dict)
    """For each sparse layer, a bool tensor that is True where the router's own choice differs."""


@dataclass(slots=True, frozen=True, eq=False)
class RouterReplay:
    """Selection of experts in one sparse layer for one micro-batch."""

    batch: BatchRouting
    layer: int
    """Index of the layer among all sparse layers of the model."""

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, compute_topk: TopkFn
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores and the indices [T, K] of the experts to use; called by Megatron."""
        values, own_TK = compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        experts_TK = self.batch.experts_TLK[:, self.layer]
        if self.batch.is_recording:
            experts_TK.copy_(own_TK)
            return values, own_TK
        replayed_TK, is_known_T = experts_TK.long(), has_experts(experts_TK)
        self.batch.differs_T[self.layer] = is_known_T & (replayed_TK.sort(-1).values != own_TK.sort(-1).values).any(-1)
        used_TK = torch.where(is_known_T[:, None], replayed_TK, own_TK)
        return scores.gather(1, used_TK), used_TK


def hook_sparse_layers(chunks: Iterable[nn.Module], spec: ModelSpec, layout: Layout, hook: Callable[..., None]) -> None:
    """Run hook(index, layer, inputs, keywords) before each pass of a layer with experts.

    `index` is the index of the layer among all sparse layers of the model. `chunks` are this rank's
    chunks in the order of the virtual pipeline.
    """
    assert spec.experts is not None
    size = spec.num_layers // (layout.pp * layout.vpp)
    for number, chunk in enumerate(cast("Any", chunks)):
        first = (number * layout.pp + layout.pp_rank) * size
        for index, layer in enumerate(chunk.language.decoder.layers, start=first):
            if spec.is_sparse(index):
                layer.register_forward_pre_hook(partial(hook, sum(spec.experts.sparse_layers[:index])), with_kwargs=True)


class RoutingReplay:
    """Records or replays the experts of all passes of one model on this rank."""

    def __init__(self, chunks: Iterable[nn.Module], spec: ModelSpec, layout: Layout) -> None:
        """Register hooks on the sparse layers of the chunks.

        Args:
            chunks: Model chunks of this rank (ModelChunk), in the order of the virtual pipeline.
            spec: Specification of the model, which must have experts.
            layout: Parallel layout of the model.
        """
        assert spec.experts is not None
        self._layout, self._is_recording, self._is_enabled = layout, False, True
        self._size = (sum(spec.experts.sparse_layers), spec.experts.top_k)
        self._dtype = torch.uint8 if spec.experts.num_experts <= 256 else torch.int16
        self._replayed: list[BatchRouting] = []
        for chunk in cast("Any", chunks):
            chunk.start_routing = self._start
        hook_sparse_layers(chunks, spec, layout, _set_replay)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Let the routers use their own choices, for weights other than the policy's."""
        self._is_enabled = False
        try:
            yield
        finally:
            self._is_enabled = True

    @contextmanager
    def recording(self, batches: Sequence[MicroBatch]) -> Iterator[None]:
        """Record the choices of the passes in the block in routed_experts_TLK of the micro-batches.

        A rank records the tokens and layers that it computes; the rest of the tensor stays 0, as do
        the rows of padding.
        """
        for batch in batches:
            batch.routed_experts_TLK = torch.zeros(batch.num_tokens, *self._size, dtype=self._dtype, device=batch.token_T.device)
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False
        for batch in batches:
            for origin, first, last in zip(batch.origin_S, batch.offset_S1[:-1], batch.offset_S1[1:], strict=True):
                if origin is None and batch.routed_experts_TLK is not None:
                    batch.routed_experts_TLK[first:last] = 0

    def _start(self, batch: MicroBatch) -> BatchRouting | None:
        """Return the routing of a pass of a micro-batch; None if the routers choose."""
        if not self._is_enabled or batch.routed_experts_TLK is None:
            return None
        tp = self._layout.tp if self._layout.sequence_parallel else 1
        rank, num = self._layout.tp_rank if tp > 1 else 0, batch.num_tokens // tp
        routing = BatchRouting(batch.routed_experts_TLK[rank * num : (rank + 1) * num], self._is_recording)
        if not self._is_recording:
            self._replayed.append(routing)
        return routing

    def clear_statistics(self) -> None:
        """Forget the passes of which `differences` would return the metrics."""
        self._replayed.clear()

    def differences(self) -> dict[str, float]:
        """Return the shares of replayed choices that differ from the router's own choice.

        Counts all passes since the last call of `clear_statistics`. The metrics are the share of
        (token, sparse layer) pairs, and the share of tokens with such a pair. Tokens without
        recorded experts are not counted. Empty if nothing was replayed. All ranks must call this
        method together.
        """
        if not self._replayed:
            return {}
        by_batch: dict[tuple[int, int], list[BatchRouting]] = {}
        for routing in self._replayed:  # the chunks of an interleaved pipeline share a micro-batch
            by_batch.setdefault((routing.experts_TLK.data_ptr(), routing.experts_TLK.shape[0]), []).append(routing)
        self._replayed = []
        pairs = tokens = torch.zeros(2, dtype=torch.int64)
        for routings in by_batch.values():
            known_TL = has_experts(routings[0].experts_TLK)
            differs = {layer: row_T for routing in routings for layer, row_T in routing.differs_T.items()}
            of_tokens_2T = torch.zeros(2, known_TL.shape[0], dtype=torch.int32, device=known_TL.device)
            for layer, row_T in differs.items():
                pairs = pairs + torch.stack((row_T.sum(), known_TL[:, layer].sum())).cpu()
                of_tokens_2T |= torch.stack((row_T, known_TL[:, layer])).int()
            dist.all_reduce(of_tokens_2T, op=dist.ReduceOp.MAX, group=self._layout.pp_group)
            if self._layout.is_first_stage:
                tokens = tokens + of_tokens_2T.sum(1).cpu()
        counts = torch.cat((pairs, tokens))
        dist.all_reduce(counts)
        differing_pairs, num_pairs, differing_tokens, num_tokens = counts.tolist()
        return {
            "routing_replay/token_layer_diff_fraction": differing_pairs / max(num_pairs, 1),
            "routing_replay/token_diff_fraction": differing_tokens / max(num_tokens, 1),
        }


def _set_replay(sparse_index: int, layer: nn.Module, _inputs: tuple, kwargs: dict) -> None:
    """Set the experts of the layer's router; a forward pre-hook of a sparse layer."""
    batch: BatchRouting | None = kwargs["packed_seq_params"].routing
    cast("Any", layer).mlp.router.router_replay = None if batch is None else RouterReplay(batch, sparse_index)
