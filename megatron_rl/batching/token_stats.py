"""Per-token logprobs and entropies of a step, for recorded rollouts (rollouts.save=all).

In a step of one update no forward pass precedes it, so the logprobs of the update itself are the
step's.
"""

from collections.abc import Sequence

import torch

from megatron_rl.algo.algorithms import needs_old_logprob_forward
from megatron_rl.batching.packing import scatter_to_rollouts
from megatron_rl.config import Settings
from megatron_rl.distributed.world import all_gather_large_object
from megatron_rl.types import LossInputs, MicroBatch, Rollout, SegmentSource


class TokenStats:
    """Collects per-token statistics of a step on one rank.

    `record` is the `record` argument of Policy.update.
    """

    def __init__(self) -> None:
        self._stats_by_batch: dict[tuple[SegmentSource | None, ...], tuple[MicroBatch, torch.Tensor, torch.Tensor]] = {}
        """Old logprobs and entropies ([T] each) of each micro-batch, by the sources of its
        segments.
        """

    def record(self, batch: MicroBatch, rows_R: torch.Tensor, rows: LossInputs) -> None:
        """Keep old logprobs and entropies of a micro-batch, unless it was recorded before."""
        whose = tuple(batch.origin_S)
        if whose not in self._stats_by_batch:
            old_T, entropy_T = (
                torch.zeros_like(batch.weight_T).index_copy(0, rows_R, number_R.detach())
                for number_R in (rows.old_logprob_R, rows.entropy_R)
            )
            self._stats_by_batch[whose] = (batch, old_T, entropy_T)

    def write_to(self, rollouts: Sequence[Rollout]) -> None:
        """Write the collected columns to the rollouts.

        All ranks call this together.
        """
        batches, old, entropies = zip(*self._stats_by_batch.values(), strict=True) if self._stats_by_batch else ((), (), ())
        write_column(rollouts, batches, old, column="old_logprobs")
        write_column(rollouts, batches, entropies, column="entropies")


def build_token_stats(settings: Settings) -> TokenStats | None:
    """Return a collector, or None if nothing is to be recorded.

    It is also None if a step makes several updates without old logprobs (bypass), because later
    updates do not have the logprobs of the weights at the start of the step.
    """
    num_updates = settings.batch.minibatches * settings.batch.epochs
    is_of_step = num_updates == 1 or needs_old_logprob_forward(settings.algo, num_updates=num_updates)
    return TokenStats() if settings.rollouts.save == "all" and is_of_step else None


def write_column(rollouts: Sequence[Rollout], batches: Sequence[MicroBatch], numbers: Sequence[torch.Tensor], *, column: str) -> None:
    """Write per-entry results of all ranks' micro-batches to their sequences.

    All ranks call this.
    """
    for columns in all_gather_large_object(scatter_to_rollouts(rollouts, batches, numbers)):
        for (rollout, context), values in columns.items():
            rollouts[rollout].sequences[context].set_column(column, values)
