"""Estimators of a KL divergence from single samples, and the adaptive KL coefficient."""

from collections.abc import Callable, Mapping

import torch

MAX_LOG_RATIO = 20.0
"""Cap on log-ratios before exp. e^20 is far outside any clip range; float32 overflows at e^88, and
0 * inf would be a NaN gradient.
"""
MAX_K3 = 10.0
"""Cap on k3 of one token, above which its gradient is 0 (as in verl and slime). Without the cap a
single token could dominate the clipped gradient.
"""


def k1(logprob_R: torch.Tensor, reference_R: torch.Tensor) -> torch.Tensor:
    """Return logprob - reference: unbiased, of either sign.

    Its gradient has mean zero, so it has no effect as a loss term.
    """
    return logprob_R - reference_R


def k2(logprob_R: torch.Tensor, reference_R: torch.Tensor) -> torch.Tensor:
    """Return half the squared difference: biased, never negative.

    The mean of its gradient is that of KL(pi || reference).
    """
    return (reference_R - logprob_R).square() / 2


def k3(logprob_R: torch.Tensor, reference_R: torch.Tensor) -> torch.Tensor:
    """Return exp(d) - 1 - d with d = reference - logprob, at most MAX_K3: unbiased, never negative.

    Source: GRPO, arXiv 2402.03300, eq. 4. The mean of its gradient is that of KL(reference || pi).
    """
    difference_R = (reference_R - logprob_R).clamp(max=MAX_LOG_RATIO)
    return (difference_R.expm1() - difference_R).clamp(max=MAX_K3)


MAX_ERROR = 0.2
"""Bound on the relative error of a KL divergence from its target, for adapting the coefficient."""


def adaptive_kl_coef(coef: float, kl: float, *, target: float, num_episodes: int, horizon: int) -> float:
    """Return the KL coefficient of the next step, given the measured KL divergence of this one.

    Computes coef * (1 + e * num_episodes / horizon), with e = kl / target - 1 clipped to
    [-MAX_ERROR, MAX_ERROR] (D. Ziegler et al., arXiv 1909.08593, section 2.2).
    """
    error = min(max(kl / target - 1.0, -MAX_ERROR), MAX_ERROR)
    return coef * (1.0 + error * num_episodes / horizon)


ESTIMATORS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""(logprob_R, reference_R) -> estimates of KL(pi || reference) at tokens sampled from pi (J.
Schulman, "Approximating KL Divergence").
"""
