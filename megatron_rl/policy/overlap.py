"""Gradients reduced over data-parallel ranks while the last micro-batch's backward pass goes on: parallel.overlap_grad_reduce.

Megatron (megatron-core 0.16.1, distributed/param_and_grad_buffer.py) reduces a bucket as soon as all of its parameters have a gradient, on
every rank in the same order, and ends with an assertion where one has none. Here that happens: a micro-batch without a picture gives the
vision tower none, one without a sampled token gives the head none. So the ranks agree before every update.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads

from megatron_rl.types import MicroBatch


class GradReduceOverlap:
    """Of a model that one pipeline stage holds whole."""

    def __init__(self, chunk: DistributedDataParallel, *, tp: int) -> None:
        self._chunk, self._tp = chunk, tp
        self._needs_pictures = any(parameter.requires_grad for parameter in chunk.module.vision.parameters())
        self._is_possible = False
        chunk.module.config.no_sync_func = self._no_sync
        chunk.module.config.finalize_model_grads_func = self._finalize

    def require_same_counts(self, batches: list[MicroBatch], *, is_partial: bool) -> None:
        """Before an update by these micro-batches: whether the last ones of all ranks give every trained parameter a gradient. If not, the
        reduction follows the backward pass. is_partial: the loss does not depend on all of them."""
        last = batches[-1]
        has_pictures = last.grid_I3.shape[0] >= self._tp or not self._needs_pictures  # each tensor-parallel rank encodes one at least
        can = torch.tensor(int(has_pictures and bool(last.mask_T.any()) and not is_partial))
        dist.all_reduce(can, dist.ReduceOp.MIN)
        self._is_possible = bool(can)

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        """Around all micro-batches but the last, for Megatron's schedule."""
        with self._chunk.no_sync():
            yield
        for group in self._chunk.bucket_groups:
            group.is_last_microbatch = self._is_possible

    def _finalize(self, model: list[DistributedDataParallel], *arguments: object, **options: object) -> None:
        if not self._is_possible:
            self._chunk.start_grad_sync()
        finalize_model_grads(model, *arguments, **options)
