"""Teacher on servers: its most probable tokens as target distributions of the policy.

The servers return the K most probable tokens of the teacher at each sampled token. All other tokens
are one outcome, the tail, as with a teacher in this process. In shapes, R is the number of rows
(sampled tokens), V the number of vocabulary entries on this rank, and K the number of top tokens.
"""

import torch
import torch.distributed as dist

from megatron_rl.policy.divergence import MIN_TAIL, TeacherTerm, VocabDivergence
from megatron_rl.policy.logprobs import TeacherComparison, TokenDistribution
from megatron_rl.types import MicroBatch


class ServerTeacher:
    """Distributions of a teacher on servers (MicroBatch.teacher_top_RK)."""

    has_divergence = True

    def __init__(self, *, policy: TokenDistribution, term: TeacherTerm) -> None:
        """Find the ids that the policy can sample. All ranks must call this together.

        Args:
            policy: Token distribution of the policy.
            term: Divergence of the update.
        """
        parts = [torch.empty_like(policy.banned_V) for _ in range(policy.group.size())]
        dist.all_gather(parts, policy.banned_V, group=policy.group)
        self._is_allowed = ~torch.cat(parts)
        self._num_allowed, self._policy = int(self._is_allowed.sum()), policy
        self._divergence = VocabDivergence(
            terms=term.divergence, banned_V=policy.banned_V, temperature=policy.temperature, group=policy.group, top_k=term.top_k
        )  # fmt: skip

    def compare(self, batch: MicroBatch) -> TeacherComparison:
        """Return the comparison of the policy with the teacher in a micro-batch."""
        device = self._is_allowed.device
        top = batch.teacher_top_RK
        if top is None:  # a micro-batch without sampled tokens
            top = (torch.zeros(0, 1, dtype=torch.long), torch.zeros(0, 1))
        return TeacherComparison(columns=tuple(column.to(device, non_blocking=True) for column in top), divergence=self._diverge)

    def _diverge(self, logits_RV: torch.Tensor, ids_RK: torch.Tensor, logprob_RK: torch.Tensor) -> tuple[torch.Tensor, ...]:
        log_q_RV, top_RV = self.spread_tail(ids_RK, logprob_RK)
        return self._divergence(logits_RV, log_q_RV * self._policy.temperature, top_RV)  # the divergence divides both by it

    def spread_tail(self, ids_RK: torch.Tensor, logprob_RK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities [R, V] of this rank's ids, and a mask [R, V] of the top tokens.

        The probability of the tail is divided equally among its tokens, because only its sum enters
        the divergence. It is resolved to about 1e-7, the precision of fp32 logprobs. Ids that the
        policy never samples are part of the tail.
        """
        size, whole = self._policy.banned_V.numel(), self._is_allowed.numel()
        is_top_RK = (ids_RK >= 0) & (ids_RK < whole) & self._is_allowed[ids_RK.clamp(0, whole - 1)]
        tail_R = (1 - logprob_RK.double().exp().where(is_top_RK, 0.0).sum(-1)).clamp(min=MIN_TAIL).float()
        num_others_R = (self._num_allowed - is_top_RK.sum(-1)).clamp(min=1)
        place_RK = ids_RK - self._policy.first_id
        place_RK = place_RK.where(is_top_RK & (place_RK >= 0) & (place_RK < size), size)
        log_q_RV = (tail_R.log() - num_others_R.log())[:, None].repeat(1, size + 1).scatter(1, place_RK, logprob_RK)
        top_RV = torch.zeros(*log_q_RV.shape, dtype=torch.bool, device=log_q_RV.device).scatter(1, place_RK, True)
        return log_q_RV[:, :size], top_RV[:, :size]
