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
from torch.utils.checkpoint import checkpoint

_REMOVED = -1e30


@dataclass(slots=True, frozen=True, kw_only=True)
class TeacherComparison:
    """Compares the policy's distribution at each row with the distribution of a teacher."""

    columns: tuple[torch.Tensor, ...]
    """Tensors with one row per sampled token that determine the teacher's distributions, such as
    final hidden states [R, H].
    """
    divergence: Callable[..., tuple[torch.Tensor, ...]]
    """Computes the divergence [R], and 1.0 for each row with a clipped term, from the policy's
    logits [R, V] and the rows of `columns`.
    """


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
        self, head: Callable[[torch.Tensor], torch.Tensor], hidden_RH: torch.Tensor, target_R: torch.Tensor,
        compare: TeacherComparison | None = None,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """Return the logprob of each target and the entropy of each row.

        Logprobs and entropies are fp32 [R] and equal on every tensor-parallel rank. Targets are
        token ids; they need not belong to this rank's part of the vocabulary. `head` computes the
        logits [*, V] of hidden states. With more than `rows_per_block` rows, the logits of each
        block are recomputed in the backward pass, so that the logits of only one block are in
        memory at a time. With `compare`, the divergence of each row from a teacher and its clip are
        returned too.
        """

        def block(hidden: torch.Tensor, target: torch.Tensor, *teacher: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = head(hidden)
            found = vocab_parallel_logprobs(
                logits, target, banned_V=self.banned_V, temperature=self.temperature, first_id=self.first_id, group=self.group
            )
            return found if compare is None else (*found, *compare.divergence(logits, *teacher))

        rows = (hidden_RH, target_R) if compare is None else (hidden_RH, target_R, *compare.columns)
        if target_R.numel() <= self.rows_per_block:
            return block(*rows)
        blocks = zip(*(column.split(self.rows_per_block) for column in rows), strict=True)
        parts = [checkpoint(block, *row, use_reentrant=False, preserve_rng_state=False) for row in blocks]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def vocab_parallel_logprobs(
    logits_RV: torch.Tensor, target_R: torch.Tensor, *, banned_V: torch.Tensor, temperature: float, first_id: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logprob of each target and the entropy of each row.

    Logprobs and entropies are fp32 [R] and equal on every tensor-parallel rank. `logits_RV` and the
    boolean mask `banned_V` cover this rank's part of the vocabulary, which starts at id `first_id`.
    `target_R` contains token ids, which need not belong to this rank's part of the vocabulary.

    The function is differentiable with respect to the logits. Each rank receives the gradient of
    its own part.
    """
    return _LogprobsAndEntropies.apply(logits_RV, target_R - first_id, banned_V, temperature, group)


class _LogprobsAndEntropies(torch.autograd.Function):
    """Logprobs log p(target) and entropies H of p = softmax(logits / temperature).

    The backward pass computes the derivatives with respect to logit v in closed form,

        d log p(target) / d logit_v = ([v == target] - p_v) / temperature,
        d H / d logit_v = -p_v (log p_v + H) / temperature.

    It saves only the logits and numbers per row. On a GPU, torch.compile fuses each of the three
    functions over [R, V] below, so that no fp32 tensor of this size is ever stored.
    """

    @staticmethod
    def forward(
        ctx, logits_RV: torch.Tensor, place_R: torch.Tensor, banned_V: torch.Tensor, temperature: float, group: dist.ProcessGroup,  # noqa: ANN001
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        row_peak, row_sums, _, _ = _COMPILED if logits_RV.is_cuda else _EAGER
        peak_R = row_peak(logits_RV, banned_V, temperature)
        if group.size() > 1:
            dist.all_reduce(peak_R, dist.ReduceOp.MAX, group=group)
        sums_3R = row_sums(logits_RV, banned_V, temperature, peak_R, place_R)
        if group.size() > 1:
            dist.all_reduce(sums_3R, group=group)
        total_R, weighted_R, picked_R = sums_3R
        log_total_R = total_R.log()
        entropy_R = log_total_R - weighted_R / total_R
        ctx.save_for_backward(logits_RV, place_R, banned_V, peak_R + log_total_R, entropy_R)
        ctx.temperature = temperature
        return picked_R - log_total_R, entropy_R

    @staticmethod
    def backward(ctx, grad_logprob_R: torch.Tensor, grad_entropy_R: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:  # noqa: ANN001
        logits_RV, place_R, banned_V, log_sum_R, entropy_R = ctx.saved_tensors
        gradient = (_COMPILED if logits_RV.is_cuda else _EAGER)[2]
        grad_RV = gradient(logits_RV, banned_V, ctx.temperature, log_sum_R, entropy_R, place_R, grad_logprob_R, grad_entropy_R)
        return grad_RV, None, None, None, None


def row_log_sum(logits_RV: torch.Tensor, banned_V: torch.Tensor, temperature: float, group: dist.ProcessGroup) -> torch.Tensor:
    """Return log sum exp of each row's scaled logits over the whole vocabulary, fp32 [R]."""
    row_peak, _, _, row_sum_exp = _COMPILED if logits_RV.is_cuda else _EAGER
    peak_R = row_peak(logits_RV, banned_V, temperature)
    if group.size() > 1:
        dist.all_reduce(peak_R, dist.ReduceOp.MAX, group=group)
    total_R = row_sum_exp(logits_RV, banned_V, temperature, peak_R)
    if group.size() > 1:
        dist.all_reduce(total_R, group=group)
    return peak_R + total_R.log()


def scaled_logits(logits_RV: torch.Tensor, banned_V: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return logits / temperature in fp32, with a value near -infinity for banned ids."""
    return (logits_RV.float() / temperature).masked_fill(banned_V, _REMOVED)


def _row_peak(logits_RV: torch.Tensor, banned_V: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the largest scaled logit of each row."""
    return scaled_logits(logits_RV, banned_V, temperature).amax(-1)


def _row_sums(
    logits_RV: torch.Tensor, banned_V: torch.Tensor, temperature: float, peak_R: torch.Tensor, place_R: torch.Tensor
) -> torch.Tensor:
    """Return sum(exp(x)), sum(x exp(x)) and x[place] of each row as [3, R].

    x is the scaled logits minus the peak. x[place] is 0 if `place`, an index into this rank's part
    of the vocabulary, lies outside of it.
    """
    shifted_RV = scaled_logits(logits_RV, banned_V, temperature) - peak_R[:, None]
    weight_RV = shifted_RV.exp()
    size = logits_RV.shape[1]
    picked_R = shifted_RV.gather(1, place_R.clamp(0, size - 1)[:, None])[:, 0] * ((place_R >= 0) & (place_R < size))
    return torch.stack([weight_RV.sum(-1), (weight_RV * shifted_RV).sum(-1), picked_R])


def _row_sum_exp(logits_RV: torch.Tensor, banned_V: torch.Tensor, temperature: float, peak_R: torch.Tensor) -> torch.Tensor:
    """Return sum(exp(x)) of each row, where x is the scaled logits minus the peak."""
    return (scaled_logits(logits_RV, banned_V, temperature) - peak_R[:, None]).exp().sum(-1)


def _logit_gradient(
    logits_RV: torch.Tensor, banned_V: torch.Tensor, temperature: float, log_sum_R: torch.Tensor, entropy_R: torch.Tensor,
    place_R: torch.Tensor, grad_logprob_R: torch.Tensor, grad_entropy_R: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return the gradient of the logits; see `_LogprobsAndEntropies`."""
    logp_RV = scaled_logits(logits_RV, banned_V, temperature) - log_sum_R[:, None]
    of_entropy_RV = grad_entropy_R[:, None] * (logp_RV + entropy_R[:, None])
    is_target_RV = torch.arange(logits_RV.shape[1], device=logits_RV.device) == place_R[:, None]
    grad_RV = is_target_RV * grad_logprob_R[:, None] - logp_RV.exp() * (grad_logprob_R[:, None] + of_entropy_RV)
    return (grad_RV / temperature).to(logits_RV.dtype)


_EAGER: tuple[Callable[..., torch.Tensor], ...] = (_row_peak, _row_sums, _logit_gradient, _row_sum_exp)
_COMPILED: tuple[Callable[..., torch.Tensor], ...] = tuple(torch.compile(function, dynamic=True) for function in _EAGER)


def banned_mask(banned_ids: list[int], *, first_id: int, size: int, device: torch.device) -> torch.Tensor:
    """Return a boolean mask [size] of the banned ids among first_id .. first_id + size - 1."""
    mask_V = torch.zeros(size, dtype=torch.bool)
    mask_V[[token - first_id for token in banned_ids if first_id <= token < first_id + size]] = True
    return mask_V.to(device)
