"""Runs micro-batches through the pipeline stages of a model."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import nn

from megatron_rl.batching.packing import empty_batch
from megatron_rl.compat.megatron_cpu import with_megatron_on_cpu
from megatron_rl.policy.experts import set_num_rows
from megatron_rl.policy.parallel import Layout
from megatron_rl.policy.patches import ImagePatchFn, attach_patches, prefetch
from megatron_rl.policy.transformer import ModelChunks
from megatron_rl.types import MicroBatch

HiddenReader = Callable[[MicroBatch, torch.Tensor, torch.Tensor], torch.Tensor]
"""Function (batch, rows_R, hidden_RH) -> [R] that computes one number for each sampled target.
`rows_R` holds the positions of the sampled targets in the batch; `hidden_RH` holds the hidden
states at these positions.
Example: the micro-batch with target_T [6 7 8 0 4 0] and mask_T [0 1 1 0 1 0] has rows_R [1 2 4], so
R = 3. hidden_RH is [3, H], and hidden_RH[0] belongs to target 7.
"""


class Pipeline:
    """Model chunks of this rank and the schedule that runs micro-batches through all stages."""

    def __init__(self, chunks: ModelChunks, model: Sequence[nn.Module], layout: Layout, patches: ImagePatchFn) -> None:
        """Store the model.

        Args:
            chunks: Model chunks of this rank, in the order of the virtual pipeline.
            model: Modules that the schedule calls, one per chunk: the chunks or their wrappers.
            layout: Parallel layout of the model.
            patches: Function that returns the patches of an image.
        """
        self.chunks, self.model, self.layout, self._patches = chunks, list(model), layout, patches
        self.device = next(chunks.parameters()).device

    @with_megatron_on_cpu
    @torch.no_grad()
    def forward_only(self, batches: list[MicroBatch], *on_hidden: HiddenReader) -> list[torch.Tensor]:
        """Run one forward pass and apply each function in `on_hidden` to the final hidden states.

        Runs without gradients and dropout. Returns one [N, T] tensor per micro-batch, where N is
        the number of functions; entries where mask_T is False are 0.

        Example: two functions and one micro-batch with mask_T [0 1 1 0 1 0]. Both functions are
        called with rows_R = [1 2 4] and with hidden_RH, which has the shape [3, H]. If the first
        function returns logprobs [-0.3, -1.2, -0.7] and the second returns values [0.5, 0.5, 0.9],
        the result is
            [[[0, -0.3, -1.2, 0, -0.7, 0],
              [0,  0.5,  0.5, 0,  0.9, 0]]].
        """

        def scattered(batch: MicroBatch, rows_R: torch.Tensor, hidden_RH: torch.Tensor, **_: object) -> torch.Tensor:
            said_NR = torch.stack([say(batch, rows_R, hidden_RH) for say in on_hidden])
            return nothing(batch).index_copy(1, rows_R, said_NR)

        def nothing(batch: MicroBatch) -> torch.Tensor:
            return batch.weight_T.new_zeros(len(on_hidden), batch.num_tokens)

        results = self.run(batches, scattered, forward_only=True)
        if self.layout.pp > 1:
            results = results or list(map(nothing, batches))
            for result in results:
                dist.broadcast(result, src=self.layout.last_stage_rank, group=self.layout.pp_group)
        return results

    @with_megatron_on_cpu
    @torch.no_grad()
    def visit(self, batches: list[MicroBatch]) -> None:
        """Run one forward pass without results, for what the layers record themselves."""
        self.run(batches, lambda *_, **__: None, forward_only=True)

    def run(self, batches: list[MicroBatch], on_hidden: Callable, *, forward_only: bool) -> list:
        """Run Megatron's forward/backward schedule over the micro-batches and return the results.

        `on_hidden` runs on the last pipeline stage only, with the hidden states of rows_R. Results
        of empty micro-batches, which `_pad` adds, are removed.
        """
        num_before, padded = self._pad(batches)

        def forward_step(iterator: Iterator[MicroBatch], model: nn.Module) -> tuple[torch.Tensor, Callable]:
            batch = next(iterator)
            return model(batch, batch.row_R), partial(on_hidden, batch, batch.row_R)

        def coming(chunk: nn.Module) -> Iterator[MicroBatch]:
            sees = chunk.pre_process and any(batch.images for batch in padded)
            return prefetch(self.load_image_patches, padded) if sees else iter(padded)

        self.chunks.train(not forward_only)
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[coming(chunk) for chunk in self.chunks],
            model=cast("list[nn.Module]", self.model),
            num_microbatches=len(padded),
            seq_length=max(batch.num_tokens for batch in padded),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results[num_before : num_before + len(batches)]

    def _pad(self, batches: list[MicroBatch]) -> tuple[int, list[MicroBatch]]:
        """Add empty micro-batches; return the number that precedes the batches, and all batches.

        Under expert parallelism, every rank of an expert-parallel group takes part in each layer
        with experts, so a rank with fewer micro-batches begins with empty ones. The last one then
        still has gradients for all parameters, if any has (overlap.py). The ranks agree on the
        largest micro-batch once per pass, to which the layers pad what they exchange. In an
        interleaved pipeline, empty micro-batches at the end make the number a multiple of pp.
        """
        num_before, multiple = 0, self.layout.tp if self.layout.sequence_parallel else 1
        if self.layout.ep > 1:
            num_batches, num_tokens = self._largest_sizes(batches, at_least=multiple)
            num_before = num_batches - len(batches)
            set_num_rows(self.chunks, num_tokens // multiple)
        num_after = -(num_before + len(batches)) % self.layout.pp if self.layout.vpp > 1 else 0
        before, after = ([empty_batch(multiple, device=self.device) for _ in range(num)] for num in (num_before, num_after))
        return num_before, before + batches + after

    def _largest_sizes(self, batches: list[MicroBatch], *, at_least: int) -> tuple[int, int]:
        """Return the largest number of micro-batches, and of tokens of one, on the ep ranks."""
        largest = torch.tensor([len(batches), max((batch.num_tokens for batch in batches), default=at_least)], device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.layout.ep_group)
        num_batches, num_tokens = largest.tolist()
        return num_batches, num_tokens

    def load_image_patches(self, batch: MicroBatch) -> MicroBatch:
        """Return the batch with the patches of this rank's images added.

        Only ranks of the first pipeline stage encode images; other ranks return the batch
        unchanged.
        """
        if not self.chunks[0].pre_process:
            return batch
        return attach_patches(batch, self._patches, self.layout, like=next(self.chunks.parameters()))
