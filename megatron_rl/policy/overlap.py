"""Overlaps gradient reduction with the backward pass of the last micro-batch of an update.

Enabled by parallel.overlap_grad_reduce. Megatron (megatron-core 0.16.1,
distributed/param_and_grad_buffer.py) reduces a bucket as soon as all parameters of the bucket have
a gradient. Buckets are reduced in the same order on every rank. Megatron raises an AssertionError
if a parameter has no gradient. In this trainer, parameters can lack a gradient. A micro-batch
without an image produces no gradient for the vision tower, and a micro-batch without a sampled
token produces no gradient for the output heads. Before every update, the ranks therefore decide
together whether to overlap.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import nn

from megatron_rl.policy.transformer import ModelChunk
from megatron_rl.types import MicroBatch


class GradReduceOverlap:
    """Overlaps gradient reduction with the backward pass of a model that has no pipeline stages."""

    def __init__(self, chunk: DistributedDataParallel, *, tp: int) -> None:
        self._chunk, self._tp = chunk, tp
        module = cast("ModelChunk", chunk.module)
        assert module.vision is not None
        self._needs_pictures = any(parameter.requires_grad for parameter in module.vision.parameters())
        self._is_possible = False
        module.config.no_sync_func = self._no_sync
        module.config.finalize_model_grads_func = self._finalize

    def require_same_counts(self, batches: list[MicroBatch], *, is_partial: bool) -> None:
        """Decide, collectively over all ranks, whether this update overlaps its gradient reduction.

        Overlapping is possible if the last micro-batch of every rank produces a gradient for every
        trainable parameter. If overlapping is not possible, the reduction runs after the backward
        pass. `is_partial` is True if some trainable parameters do not affect the loss.
        """
        last = batches[-1]
        # The vision tower of every tensor-parallel rank needs at least one image.
        has_pictures = last.grid_I3.shape[0] >= self._tp or not self._needs_pictures
        can = torch.tensor(int(has_pictures and bool(last.mask_T.any()) and not is_partial))
        dist.all_reduce(can, dist.ReduceOp.MIN)
        self._is_possible = bool(can)

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        """Defer gradient reduction.

        Megatron enters this context manager for every micro-batch of an update except the last one.
        """
        with self._chunk.no_sync():
            yield
        for group in self._chunk.bucket_groups + self._chunk.expert_parallel_bucket_groups:
            group.is_last_microbatch = self._is_possible

    def _finalize(self, model: list[nn.Module], *arguments: Any, **options: Any) -> None:
        if not self._is_possible:
            self._chunk.start_grad_sync()
        finalize_model_grads(model, *arguments, **options)
