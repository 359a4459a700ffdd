"""Divergence of the policy's token distribution from a teacher's, with vocabulary parallelism.

Logits are never gathered: tensor-parallel ranks reduce sums per row and, with top_k, exchange the
teacher's K best logits of each row. In shapes, R is the number of rows (sampled tokens), V the
number of vocabulary entries on this rank, and K the number of top tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.policy.logprobs import row_log_sum, scaled_logits

DivergenceFn = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
"""(log p, log q) -> terms f of the divergence, g = dD / d log p, and with a clip the mask of the
clipped terms (algo/divergences.py).
"""
Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor of the policy, and the same of the teacher."""
MIN_TAIL = 1e-30
"""Lower bound on the probability of the tail, so that its logarithm is finite."""


@dataclass(slots=True, frozen=True, kw_only=True)
class TeacherTerm:
    """Divergence that the teacher adds to an update."""

    divergence: DivergenceFn
    """Terms of the divergence (algo/divergences.py)."""
    top_k: int = 0
    """See VocabDivergence.top_k."""


@dataclass(slots=True, frozen=True, kw_only=True)
class VocabDivergence:
    """Computes the divergence of each row from logits of the policy and of the teacher."""

    terms: DivergenceFn
    banned_V: torch.Tensor
    """Boolean mask of the ids that are left out of both distributions, for this rank's part of the
    vocabulary.
    """
    temperature: float
    group: dist.ProcessGroup
    top_k: int = 0
    """Number of the teacher's most probable tokens that are outcomes of their own; all other tokens
    are one outcome. 0 makes every token an outcome of its own.
    """

    def __call__(
        self, logits_RV: torch.Tensor, teacher_logits_RV: torch.Tensor, top_RV: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the divergence of each row, and 1.0 for each row with a clipped term, else 0.0.

        Both are fp32 [R] and equal on every tensor-parallel rank. The divergence is differentiable
        with respect to `logits_RV`. Each rank receives the gradient of its own part of the
        vocabulary. `top_RV` is the mask of the top tokens if it is known.
        """
        return _Divergence.apply(logits_RV, teacher_logits_RV.detach(), top_RV, self)

    def log_sum(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Return log sum exp of each row's scaled logits over the whole vocabulary, [R]."""
        return row_log_sum(logits_RV, self.banned_V, self.temperature, self.group)

    def find_top(self, teacher_logits_RV: torch.Tensor) -> torch.Tensor:
        """Return a mask [R, V] of the teacher's top_k most probable tokens of all ranks together.

        Ranks exchange K candidates per row.
        """
        allowed_RV = teacher_logits_RV.masked_fill(self.banned_V, float("-inf"))
        num_rows, size = allowed_RV.shape
        best_RK, place_RK = allowed_RV.topk(min(self.top_k, size), dim=-1)
        num = best_RK.shape[1]
        candidates = [torch.empty_like(best_RK) for _ in range(self.group.size())]
        dist.all_gather(candidates, best_RK.contiguous(), group=self.group)
        joined = torch.cat(candidates, 1)
        winners_RK = joined.topk(min(self.top_k, joined.shape[1]), dim=-1).indices
        is_mine_RK = winners_RK // num == self.group.rank()
        mine_RK = place_RK.gather(1, winners_RK % num).where(is_mine_RK, size)
        return torch.zeros(num_rows, size + 1, dtype=torch.bool, device=mine_RK.device).scatter(1, mine_RK, True)[:, :size]


class _Divergence(torch.autograd.Function):
    """Divergence D of each row.

    For a token v that is an outcome of its own, dD / d logit_v = (g_v - p_v G) / temperature, where
    G is the sum of g over all outcomes. For a token in the tail, which has probability P, g_v is
    replaced by p_v g_tail / P. The backward pass recomputes the probabilities. On a GPU,
    torch.compile fuses the functions over [R, V], so that no fp32 tensor of this size is stored.
    """

    @staticmethod
    def forward(
        ctx, logits_RV: torch.Tensor, teacher_logits_RV: torch.Tensor, top_RV: torch.Tensor | None, how: VocabDivergence,  # noqa: ANN001
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        row_sums, _ = _COMPILED if logits_RV.is_cuda else _EAGER
        log_sums = (how.log_sum(logits_RV), how.log_sum(teacher_logits_RV))
        if top_RV is None and how.top_k:
            top_RV = how.find_top(teacher_logits_RV)
        sums = row_sums((logits_RV, teacher_logits_RV), how.banned_V, how.temperature, log_sums, top_RV, how.terms)
        if how.group.size() > 1:
            dist.all_reduce(sums, group=how.group)
        divergence_R, total_R, tail_p_R, tail_q_R, num_clipped_R = sums
        ratio_R = torch.zeros_like(total_R)
        if top_RV is not None:
            tail_p_R, tail_q_R = tail_p_R.clamp(min=MIN_TAIL), tail_q_R.clamp(min=MIN_TAIL)
            term_R, grad_R, *clipped = how.terms(tail_p_R.log(), tail_q_R.log())
            divergence_R, total_R, ratio_R = divergence_R + term_R, total_R + grad_R, grad_R / tail_p_R
            num_clipped_R = sum(clipped, num_clipped_R)
        ctx.save_for_backward(logits_RV, teacher_logits_RV, *log_sums, total_R, ratio_R, top_RV)
        ctx.how = how
        has_clipped_R = num_clipped_R.clamp(max=1)
        ctx.mark_non_differentiable(has_clipped_R)
        return divergence_R, has_clipped_R

    @staticmethod
    def backward(ctx, grad_R: torch.Tensor, _: None) -> tuple[torch.Tensor, None, None, None]:  # noqa: ANN001
        logits_RV, teacher_logits_RV, log_sum_R, teacher_log_sum_R, total_R, ratio_R, top_RV = ctx.saved_tensors
        gradient = (_COMPILED if logits_RV.is_cuda else _EAGER)[1]
        how: VocabDivergence = ctx.how
        logits, log_sums = (logits_RV, teacher_logits_RV), (log_sum_R, teacher_log_sum_R)
        return gradient(logits, how.banned_V, how.temperature, log_sums, top_RV, how.terms, total_R, ratio_R, grad_R), None, None, None


def _row_sums(
    logits: Pair, banned_V: torch.Tensor, temperature: float, log_sums: Pair, top_RV: torch.Tensor | None, terms: DivergenceFn,
) -> torch.Tensor:  # fmt: skip
    """Return sums over this rank's vocabulary as [5, R].

    The sums are f and g over the tokens that are outcomes of their own, the probabilities of the
    tail under the policy and under the teacher, and the number of clipped terms.
    """
    log_p_RV, log_q_RV = (scaled_logits(x_RV, banned_V, temperature) - sum_R[:, None] for x_RV, sum_R in zip(logits, log_sums, strict=True))
    term_RV, grad_RV, *clipped = terms(log_p_RV, log_q_RV)
    none_R = torch.zeros_like(log_sums[0])
    if top_RV is None:
        num_R = clipped[0].sum(-1).to(none_R.dtype) if clipped else none_R
        return torch.stack([term_RV.sum(-1), grad_RV.sum(-1), none_R, none_R, num_R])
    num_R = (clipped[0] & top_RV).sum(-1).to(none_R.dtype) if clipped else none_R
    own = [x_RV.where(top_RV, 0.0).sum(-1) for x_RV in (term_RV, grad_RV)]
    tails = [log_RV.exp().where(~top_RV, 0.0).sum(-1) for log_RV in (log_p_RV, log_q_RV)]
    return torch.stack([*own, *tails, num_R])


def _logit_gradient(
    logits: Pair, banned_V: torch.Tensor, temperature: float, log_sums: Pair, top_RV: torch.Tensor | None, terms: DivergenceFn,
    total_R: torch.Tensor, ratio_R: torch.Tensor, grad_R: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return the gradient of the policy's logits; see `_Divergence`."""
    log_p_RV, log_q_RV = (scaled_logits(x_RV, banned_V, temperature) - sum_R[:, None] for x_RV, sum_R in zip(logits, log_sums, strict=True))
    p_RV = log_p_RV.exp()
    outcome_RV = terms(log_p_RV, log_q_RV)[1]
    if top_RV is not None:
        outcome_RV = torch.where(top_RV, outcome_RV, ratio_R[:, None] * p_RV)
    of_logits_RV = (outcome_RV - total_R[:, None] * p_RV) * (grad_R[:, None] / temperature)
    return of_logits_RV.to(logits[0].dtype)


_EAGER: tuple[Callable[..., torch.Tensor], ...] = (_row_sums, _logit_gradient)
_COMPILED: tuple[Callable[..., torch.Tensor], ...] = tuple(torch.compile(function, dynamic=True) for function in _EAGER)
