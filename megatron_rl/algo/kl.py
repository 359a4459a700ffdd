"""Single-sample estimators of the KL divergence, and the adaptive KL coefficient."""

from collections.abc import Callable, Mapping

import torch

MAX_LOG_RATIO = 20.0
"""Upper bound on log-ratios before exponentiation. e^20 is far outside any clip range. Without a
bound, float32 would overflow at about e^88, and 0 * inf would make the gradient NaN.
"""
MAX_K3 = 10.0
"""Upper bound on k3 per token; the gradient is 0 above it (as in verl and slime). Without the
bound, a single token could dominate the gradient.
"""


def k1(logprob_R: torch.Tensor, reference_R: torch.Tensor) -> torch.Tensor:
    """Return logprob - reference, an unbiased estimate that may be negative.

    The gradient of k1 has mean zero, so k1 has no effect as a loss term.
    """
    return logprob_R - reference_R


def k2(logprob_R: torch.Tensor, reference_R: torch.Tensor) -> torch.Tensor:
    """Return (reference - logprob)^2 / 2, a biased estimate that is never negative.

    The expected gradient of k2 is the gradient of KL(pi || reference).
    """
    return (reference_R - logprob_R).square() / 2


def k3(logprob_R: torch.Tensor, reference_R: torch.Tensor) -> torch.Tensor:
    """Return exp(d) - 1 - d with d = reference - logprob, capped at MAX_K3.

    Source: arXiv 2402.03300, eq. 4 (GRPO). Apart from the cap, k3 is unbiased and never negative.
    The expected gradient of k3 is the gradient of KL(reference || pi).
    """
    difference_R = (reference_R - logprob_R).clamp(max=MAX_LOG_RATIO)
    return (difference_R.expm1() - difference_R).clamp(max=MAX_K3)


MAX_ERROR = 0.2
"""Bound on the relative deviation of the KL divergence from its target in `adaptive_kl_coef`."""


def adaptive_kl_coef(coef: float, kl: float, *, target: float, num_episodes: int, horizon: int) -> float:
    """Return the KL coefficient for the next step, given the KL divergence measured in this step.

    The result is coef * (1 + e * num_episodes / horizon), where e is kl / target - 1, clipped to
    [-MAX_ERROR, MAX_ERROR]. Source: arXiv 1909.08593, section 2.2.
    """
    error = min(max(kl / target - 1.0, -MAX_ERROR), MAX_ERROR)
    return coef * (1.0 + error * num_episodes / horizon)


ESTIMATORS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""Estimators, keyed by algo.kl_estimator: (logprob_R, reference_R) -> per-token estimates of KL(pi
|| reference), for tokens sampled from pi (J. Schulman, "Approximating KL Divergence").
"""
