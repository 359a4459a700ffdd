"""Logprobs and entropy of the policy's token distribution, with vocabulary parallelism.

The distribution is softmax(logits / temperature) over all token ids except banned ids. The rollout
engine bans the same ids.

In shapes, R is the number of rows (sampled tokens), V the number of vocabulary entries on this
rank, and H the hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch.utils.checkpoint import checkpoint

_REMOVED = -1e30


@dataclass(slots=True, frozen=True)
class TokenDistribution:
    """Computes logprobs and entropies of sampled tokens from hidden states, block by block."""

    banned_V: torch.Tensor
    """Boolean mask of the ids that are never sampled, for this rank's part of the vocabulary."""
    temperature: float
    first_id: int
    """Id of the first entry of this rank's part of the vocabulary."""
    group: dist.ProcessGroup
    rows_per_block: int
    """Maximum number of rows of logits held in memory at once."""

    def __call__(
        self, head: Callable[[torch.Tensor], torch.Tensor], hidden_RH: torch.Tensor, target_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logprob of each target and the entropy of each row.

        Logprobs and entropies are fp32 [R] and equal on every tensor-parallel rank. Targets are
        token ids; they need not belong to this rank's part of the vocabulary. `head` computes the
        logits [*, V] of hidden states. With more than `rows_per_block` rows, the logits of each
        block are recomputed in the backward pass, so that the logits of only one block are in
        memory at a time.
        """

        def block(hidden: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return vocab_parallel_logprobs(
                head(hidden), target, banned_V=self.banned_V, temperature=self.temperature, first_id=self.first_id, group=self.group
            )

        if target_R.numel() <= self.rows_per_block:
            return block(hidden_RH, target_R)
        blocks = zip(hidden_RH.split(self.rows_per_block), target_R.split(self.rows_per_block), strict=True)
        pairs = [checkpoint(block, hidden, target, use_reentrant=False, preserve_rng_state=False) for hidden, target in blocks]
        logprobs, entropies = zip(*pairs, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)


def vocab_parallel_logprobs(
    logits_RV: torch.Tensor, target_R: torch.Tensor, *, banned_V: torch.Tensor, temperature: float, first_id: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logprob of each target and the entropy of each row.

    Logprobs and entropies are fp32 [R] and equal on every tensor-parallel rank. `logits_RV` and the
    boolean mask `banned_V` cover this rank's part of the vocabulary, which starts at id `first_id`.
    `target_R` contains token ids, which need not belong to this rank's part of the vocabulary.

    The function is differentiable. The backward pass of the function's all-reduce is the identity
    (megatron-core 0.16.1, tensor_parallel/mappings.py), so each rank receives the gradient of its
    own part.
    """
    logits_RV = (logits_RV.float() / temperature).masked_fill(banned_V, _REMOVED)
    peak_R = logits_RV.detach().amax(-1)
    if group.size() > 1:
        dist.all_reduce(peak_R, dist.ReduceOp.MAX, group=group)
    shifted_RV = logits_RV - peak_R[:, None]
    weight_RV = shifted_RV.exp()
    local_R = target_R - first_id
    is_mine_R = (local_R >= 0) & (local_R < logits_RV.shape[1])
    picked_R = shifted_RV.gather(1, local_R.clamp(0, logits_RV.shape[1] - 1)[:, None])[:, 0] * is_mine_R
    sums_3R = torch.stack([weight_RV.sum(-1), (weight_RV * shifted_RV).sum(-1), picked_R])
    total_R, weighted_R, picked_R = reduce_from_tensor_model_parallel_region(sums_3R)
    log_total_R = total_R.log()
    return picked_R - log_total_R, log_total_R - weighted_R / total_R


def banned_mask(banned_ids: list[int], *, first_id: int, size: int, device: torch.device) -> torch.Tensor:
    """Return a boolean mask [size] of the banned ids among first_id .. first_id + size - 1."""
    mask_V = torch.zeros(size, dtype=torch.bool)
    mask_V[[token - first_id for token in banned_ids if first_id <= token < first_id + size]] = True
    return mask_V.to(device)
