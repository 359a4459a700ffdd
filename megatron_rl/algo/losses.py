"""Losses and their metrics, one equation one function; pure torch, to be minimized.

Conventions: *_T are 1-D float tensors over the tokens of one packed micro-batch, already shifted so that entry t is about target t. Scalars
are sums over tokens and nothing here divides: the trainer divides once, by one global integer, so that a gradient does not depend
on how a batch was cut.
"""

from dataclasses import dataclass

import torch

MAX_LOG_RATIO = 20.0
"""Log-ratios are capped here before exp: e^20 is far outside any clip range, float32 overflows at 88, and 0 * inf is a NaN gradient."""


@dataclass(slots=True, frozen=True)
class LossMetrics:
    """Detached scalars, sorted by how they are reduced over micro-batches and ranks. The names do not depend on the data."""

    sums: dict[str, torch.Tensor]
    """Add, then divide by the global number of sampled tokens: a mean or a fraction of tokens, unweighted."""
    maxima: dict[str, torch.Tensor]
    """Take the maximum. At least 0."""


def policy_loss_T(
    logprob_T: torch.Tensor, old_logprob_T: torch.Tensor, advantage_T: torch.Tensor, *, clip_low: float, clip_high: float, dual_clip: float
) -> torch.Tensor:
    """Clipped surrogate, negated: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logprob - old_logprob).

    PPO (arXiv 1707.06347, eq. 7), with DAPO's separate upper bound (arXiv 2503.14476, eq. 8). A dual_clip above 0 bounds the loss
    of a negative advantage by dual_clip * |A| (arXiv 1912.09729, eq. 5). The gradient is -r A dlogprob, and 0 where a bound holds.
    """
    ratio_T = ratio(logprob_T, old_logprob_T)
    clipped_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_T = -torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)
    if dual_clip == 0:
        return loss_T
    return torch.where(advantage_T < 0, torch.minimum(loss_T, -dual_clip * advantage_T), loss_T)


def ratio(logprob_T: torch.Tensor, old_logprob_T: torch.Tensor) -> torch.Tensor:
    """Importance ratio pi / pi_old of each token, at most exp(MAX_LOG_RATIO), where its gradient ends."""
    return (logprob_T - old_logprob_T).clamp(max=MAX_LOG_RATIO).exp()


def kl_T(logprob_T: torch.Tensor, reference_logprob_T: torch.Tensor, *, estimator: str) -> torch.Tensor:
    """Single-sample estimates of KL(pi || reference) at tokens drawn from pi (J. Schulman, "Approximating KL Divergence", 2020).

    With d = reference_logprob - logprob: k1 = -d, unbiased, either sign; k2 = d^2 / 2, biased; k3 = exp(d) - 1 - d, unbiased and
    never negative (GRPO, arXiv 2402.03300, eq. 4). As a term of the loss only the explicit derivative counts, and its mean over pi is
    for k1 zero (no pull at all), for k2 the gradient of KL(pi || reference), for k3 the gradient of KL(reference || pi).
    """
    difference_T = reference_logprob_T - logprob_T
    match estimator:
        case "k1":
            return -difference_T
        case "k2":
            return difference_T.square() / 2
        case "k3":
            capped_T = difference_T.clamp(max=MAX_LOG_RATIO)
            return capped_T.expm1() - capped_T
    raise ValueError(f"kl_estimator={estimator}: choose one of k1, k2, k3")


def grpo_loss(
    logprob_T: torch.Tensor,
    *,
    old_logprob_T: torch.Tensor,
    advantage_T: torch.Tensor,
    mask_T: torch.Tensor,
    weight_T: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    reference_logprob_T: torch.Tensor | None,
    kl_coef: float,
    kl_estimator: str,
    entropy_T: torch.Tensor | None,
    entropy_coef: float,
) -> tuple[torch.Tensor, LossMetrics]:
    """Sum over sampled tokens of weight * (policy loss + kl_coef * KL - entropy_coef * entropy); GRPO eq. 3 (arXiv 2402.03300).

    Entries where the bool mask_T is False may hold anything, NaN included: they reach neither loss nor gradient. The reference and the
    entropy may be None where their coefficient is 0; given with a coefficient of 0 they are only measured.
    """
    assert reference_logprob_T is not None or kl_coef == 0, "a KL term needs the reference's logprobs"
    assert entropy_T is not None or entropy_coef == 0, "an entropy bonus needs the entropy"
    hidden_T = ~mask_T
    logprob_T, old_logprob_T, advantage_T, weight_T = (
        x_T.masked_fill(hidden_T, 0.0) for x_T in (logprob_T, old_logprob_T, advantage_T, weight_T)
    )
    loss_T = policy_loss_T(logprob_T, old_logprob_T, advantage_T, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    metrics = ratio_metrics(
        logprob_T.detach(), old_logprob_T, advantage_T, mask_T=mask_T, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    if reference_logprob_T is not None:
        reference_logprob_T = reference_logprob_T.masked_fill(hidden_T, 0.0)
        metrics.sums["policy/kl_reference"] = kl_T(logprob_T.detach(), reference_logprob_T, estimator="k3").sum()
        if kl_coef != 0:
            loss_T = loss_T + kl_coef * kl_T(logprob_T, reference_logprob_T, estimator=kl_estimator)
    if entropy_T is not None:
        entropy_T = entropy_T.masked_fill(hidden_T, 0.0)
        metrics.sums["policy/entropy"] = entropy_T.detach().sum()
        if entropy_coef != 0:
            loss_T = loss_T - entropy_coef * entropy_T
    return (weight_T * loss_T).sum(), metrics


def ratio_metrics(
    logprob_T: torch.Tensor,
    old_logprob_T: torch.Tensor,
    advantage_T: torch.Tensor,
    *,
    mask_T: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> LossMetrics:
    """How far the policy went from the one that sampled. Detached inputs; the first three are 0 where mask_T is False.

    A fraction counts the tokens whose gradient that bound removed. kl_old estimates KL(old || pi) by k3: the tokens are the old policy's.
    """
    ratio_T = ratio(logprob_T, old_logprob_T)
    clipped_low_T = (advantage_T < 0) & (ratio_T < 1.0 - clip_low)
    clipped_high_T = (advantage_T > 0) & (ratio_T > 1.0 + clip_high)
    clipped_dual_T = (advantage_T < 0) & (ratio_T > dual_clip) & (dual_clip > 0)
    gap_T = torch.where(mask_T, (ratio_T - 1.0).abs(), 0.0)
    sums = {
        "policy/ratio": torch.where(mask_T, ratio_T, 0.0).sum(),
        "policy/clip_low_fraction": clipped_low_T.to(ratio_T.dtype).sum(),
        "policy/clip_high_fraction": clipped_high_T.to(ratio_T.dtype).sum(),
        "policy/dual_clip_fraction": clipped_dual_T.to(ratio_T.dtype).sum(),
        "policy/kl_old": kl_T(old_logprob_T, logprob_T, estimator="k3").sum(),
    }
    largest = gap_T.max() if gap_T.numel() else gap_T.new_zeros(())
    return LossMetrics(sums=sums, maxima={"policy/ratio_gap_max": largest})


def sft_loss(logprob_T: torch.Tensor, weight_T: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood, -sum(weight * logprob). Where the weight is 0 the logprob may be anything, NaN included."""
    return -(weight_T * logprob_T.masked_fill(weight_T == 0, 0.0)).sum()


def episode_weight(num_sampled: int, *, aggregation: str, fixed_length: int) -> tuple[float, int]:
    """The weight of each sampled token of an episode, and the episode's share of the integer the loss sum is divided by.

    token_mean: the mean over all tokens of the step (DAPO, arXiv 2503.14476, eq. 8). sequence_mean: the mean over episodes of each one's
    token mean (GRPO, arXiv 2402.03300, eq. 3). fixed_length: the sum over tokens divided by episodes * fixed_length
    (Dr. GRPO, arXiv 2503.20783). num_sampled counts all turns of the episode, over all its contexts.
    """
    assert num_sampled >= 1, "an episode without sampled tokens has no loss and must not be packed"
    match aggregation:
        case "token_mean":
            return 1.0, num_sampled
        case "sequence_mean":
            return 1.0 / num_sampled, 1
        case "fixed_length":
            return 1.0, fixed_length
    raise ValueError(f"aggregation={aggregation}: choose one of token_mean, sequence_mean, fixed_length")
