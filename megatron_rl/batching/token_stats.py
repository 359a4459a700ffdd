"""Collects per-token logprobs and entropies for recorded rollouts (rollouts.save=all).

If a step makes several updates, a separate forward pass computes the old logprobs. If a step makes
only one update, the logprobs from the forward pass of the update are recorded as old logprobs.
"""

from collections.abc import Sequence

import torch

from megatron_rl.algo.algorithms import needs_old_logprob_forward
from megatron_rl.batching.packing import scatter_to_rollouts
from megatron_rl.config import Settings
from megatron_rl.distributed.world import all_gather_large_object
from megatron_rl.types import LossInputs, MicroBatch, Rollout, SegmentSource


class TokenStats:
    """Collects the per-token statistics of one step on one rank.

    To collect statistics, pass the method `record` to Policy.update as the argument `record`.
    """

    def __init__(self) -> None:
        self._stats_by_batch: dict[tuple[SegmentSource | None, ...], tuple[MicroBatch, torch.Tensor, torch.Tensor]] = {}
        """(micro-batch, old logprobs [T], entropies [T]), keyed by the sources of the micro-batch's
        segments (MicroBatch.origin_S).
        """

    def record(self, batch: MicroBatch, rows_R: torch.Tensor, rows: LossInputs) -> None:
        """Record a micro-batch's old logprobs and entropies, unless they are already recorded."""
        key = tuple(batch.origin_S)
        if key not in self._stats_by_batch:
            old_T, entropy_T = (
                torch.zeros_like(batch.weight_T).index_copy(0, rows_R, number_R.detach())
                for number_R in (rows.old_logprob_R, rows.entropy_R)
            )
            self._stats_by_batch[key] = (batch, old_T, entropy_T)

    def write_to(self, rollouts: Sequence[Rollout]) -> None:
        """Write the collected columns to the rollouts.

        All ranks must call this method together.
        """
        batches, old, entropies = zip(*self._stats_by_batch.values(), strict=True) if self._stats_by_batch else ((), (), ())
        write_column(rollouts, batches, old, column="old_logprobs")
        write_column(rollouts, batches, entropies, column="entropies")


def build_token_stats(settings: Settings) -> TokenStats | None:
    """Return a collector, or None if per-token statistics are not recorded.

    The result is also None if a step makes several updates with bypass. In this case, old logprobs
    are not computed, and only the first update uses the weights at the start of the step.
    """
    is_of_step = settings.batch.minibatches * settings.batch.epochs == 1 or needs_old_logprob_forward(settings)
    return TokenStats() if settings.rollouts.save == "all" and is_of_step else None


def write_column(rollouts: Sequence[Rollout], batches: Sequence[MicroBatch], numbers: Sequence[torch.Tensor], *, column: str) -> None:
    """Gather per-entry model outputs from all ranks and write them to the sequences' `column`.

    All ranks must call this function together.
    """
    for columns in all_gather_large_object(scatter_to_rollouts(rollouts, batches, numbers)):
        for (rollout, context), values in columns.items():
            rollouts[rollout].sequences[context].set_column(column, values)
