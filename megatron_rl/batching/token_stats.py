"""What the trainer saw of each token when it was first trained on, kept for the record of a run (run.record=all).

Where a step makes one update, nobody asks for logprobs before it: those of the update itself are the step's.
"""

from collections.abc import Sequence

import torch

from megatron_rl.algo.algorithms import needs_old_logprob_forward
from megatron_rl.batching.packing import scatter_to_rollouts
from megatron_rl.config import Settings
from megatron_rl.distributed.world import all_gather_large_object
from megatron_rl.types import LossInputs, MicroBatch, Rollout, SegmentSource


class TokenStats:
    """Collects numbers of every token that a step trains on, on one rank. `record` is the `see` of Policy.update."""

    def __init__(self) -> None:
        self._stats_by_batch: dict[tuple[SegmentSource | None, ...], tuple[MicroBatch, torch.Tensor, torch.Tensor]] = {}
        """By whose tokens a batch holds: [T] logprobs at the start of the step, and entropies. Each update is given a batch of its own."""

    def record(self, batch: MicroBatch, rows_R: torch.Tensor, rows: LossInputs) -> None:
        whose = tuple(batch.origin_S)
        if whose not in self._stats_by_batch:
            old_T, entropy_T = (
                torch.zeros_like(batch.weight_T).index_copy(0, rows_R, number_R.detach())
                for number_R in (rows.old_logprob_R, rows.entropy_R)
            )
            self._stats_by_batch[whose] = (batch, old_T, entropy_T)

    def write_to(self, rollouts: Sequence[Rollout]) -> None:
        """Every rank calls this together."""
        batches, old, entropies = zip(*self._stats_by_batch.values(), strict=True) if self._stats_by_batch else ((), (), ())
        write_column(rollouts, batches, old, column="old_logprobs")
        write_column(rollouts, batches, entropies, column="entropies")


def build_token_stats(settings: Settings) -> TokenStats | None:
    """None where nothing is to be noted, and where later updates of a step would say what the step's first weights did not (bypass)."""
    num_updates = settings.batch.minibatches * settings.batch.epochs
    is_of_step = num_updates == 1 or needs_old_logprob_forward(settings.algo, num_updates=num_updates)
    return TokenStats() if settings.run.record == "all" and is_of_step else None


def write_column(rollouts: Sequence[Rollout], batches: Sequence[MicroBatch], numbers: Sequence[torch.Tensor], *, column: str) -> None:
    """Write what a network said of this rank's tokens, and of all others', to the contexts they are of."""
    for columns in all_gather_large_object(scatter_to_rollouts(rollouts, batches, numbers)):
        for (rollout, context), values in columns.items():
            rollouts[rollout].sequences[context].set_column(column, values)
