"""On-policy distillation: the policy learns from a teacher's probabilities of its own tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_rl.algo.divergences import DIVERGENCES
from megatron_rl.algo.kl import k2, k3
from megatron_rl.config import DistillSettings, Settings, require, require_choice
from megatron_rl.types import LossInputs, Rollout

ESTIMATES: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"reverse_kl": k2, "forward_kl": k3}
"""Estimators with distill.support=sampled, keyed by distill.divergence: (logprob_R,
teacher_logprob_R) -> per-token terms. For tokens sampled from the policy, the expected gradient is
that of the divergence (algo/kl.py).
"""


@dataclass(slots=True, frozen=True, kw_only=True)
class DistillTerm:
    """Term of the loss that moves the policy towards the teacher."""

    coef: float
    divergence: Callable[[LossInputs], torch.Tensor]
    """Function (loss inputs) -> divergence of each row [R], or an estimate of it, with gradient."""
    is_for_responses: bool = False
    """True if the term is only for responses of the teacher (distill.apply_to=responses), with
    their negative log-likelihood in place of a divergence."""


def check_distill(distill: DistillSettings, *, needs_teacher: bool) -> None:
    """Raise ValueError if the divergence is unknown, or if a required teacher is missing."""
    require_choice("distill.divergence", distill.divergence, tuple(DIVERGENCES))
    if needs_teacher and not distill.has_teacher:
        raise ValueError("distill.teacher is empty, but this algorithm learns from a teacher alone; name a model directory")
    remedy = "merges checkpoints of a policy that learns from rewards, and algo=distill has none; choose another algorithm"
    require(not (needs_teacher and distill.merge.method), "distill.merge.method", distill.merge.method, remedy)


def compute_distill_coef(distill: DistillSettings, *, step: int) -> float:
    """Return the coefficient of the distillation term in a step."""
    if distill.decay_steps == 0:
        return distill.coef
    return distill.coef + (distill.final_coef - distill.coef) * min(step / distill.decay_steps, 1.0)


def has_merge(settings: Settings, *, step: int) -> bool:
    """Return True if a merge of checkpoints exists when the zero-based `step` begins.

    Steps of critic.warmup_steps do not count, because they do not change the policy.
    """
    return step - settings.critic.warmup_steps >= settings.distill.merge.every


def merges_after(settings: Settings, *, step: int) -> bool:
    """Return True if the weights after the zero-based `step` are a checkpoint to merge."""
    merge, num_updated = settings.distill.merge, step + 1 - settings.critic.warmup_steps
    return bool(merge.method) and num_updated > 0 and num_updated % merge.every == 0


def make_distill_term(distill: DistillSettings, *, step: int) -> DistillTerm | None:
    """Return the term of the loss in a step; None if the loss has none."""
    if not distill.has_teacher or distill.rewards_tokens:
        return None
    if distill.generates_responses:
        coef = compute_distill_coef(distill, step=step)
        return DistillTerm(coef=coef, divergence=negative_log_likelihood, is_for_responses=True)
    divergence = make_estimate(distill) if distill.support == "sampled" else read_divergence
    return DistillTerm(coef=compute_distill_coef(distill, step=step), divergence=divergence)


def make_estimate(distill: DistillSettings) -> Callable[[LossInputs], torch.Tensor]:
    """Return the estimator of the divergence from the sampled tokens alone."""
    estimate = ESTIMATES[distill.divergence]

    def divergence(rows: LossInputs) -> torch.Tensor:
        assert rows.teacher_logprob_R is not None
        return estimate(rows.logprob_R, rows.teacher_logprob_R)

    return divergence


def negative_log_likelihood(rows: LossInputs) -> torch.Tensor:
    """Return the negative log-likelihood of each row."""
    return -rows.logprob_R


def read_divergence(rows: LossInputs) -> torch.Tensor:
    """Return the divergence that the model computed for each row."""
    assert rows.divergence_R is not None
    return rows.divergence_R


def add_teacher_rewards(rollouts: Sequence[Rollout], *, coef: float) -> None:
    """Add coef * (teacher logprob - old logprob) to each sampled token's advantage.

    Reads and writes the sequences' columns. Sequences without teacher logprobs, because their data
    source has no teacher, are not changed. Source: "On-Policy Distillation" (Thinking Machines
    Lab, 2025), with a discount factor of 0.
    """
    for rollout in rollouts:
        if not rollout.is_trained_on:
            continue
        for sequence in rollout.sequences:
            if not sequence.teacher_logprobs:  # no teacher, or no sampled tokens: such a sequence is not packed
                continue
            columns = zip(sequence.advantages, sequence.teacher_logprobs, sequence.old_logprobs, sequence.loss_mask, strict=True)
            sequence.set_column("advantages", [a + coef * (teacher - old) * mask for a, teacher, old, mask in columns])
