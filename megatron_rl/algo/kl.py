"""Estimates of a KL divergence from single samples, one equation each."""

from collections.abc import Callable, Mapping

import torch

MAX_LOG_RATIO = 20.0
"""Log-ratios are capped here before exp: e^20 is far outside any clip range, float32 overflows at 88, and 0 * inf is a NaN gradient."""
MAX_K3 = 10.0
"""Bound on k3 of one token, where its gradient ends (as in verl and slime): without one a single token takes the whole clipped gradient."""


def k1(logprob_R: torch.Tensor, reference_R: torch.Tensor) -> torch.Tensor:
    """Unbiased, of either sign. Its gradient has the mean zero: as a term of the loss it pulls nowhere."""
    return logprob_R - reference_R


def k2(logprob_R: torch.Tensor, reference_R: torch.Tensor) -> torch.Tensor:
    """Half the squared difference: biased. The mean of its gradient is that of KL(pi || reference)."""
    return (reference_R - logprob_R).square() / 2


def k3(logprob_R: torch.Tensor, reference_R: torch.Tensor) -> torch.Tensor:
    """exp(d) - 1 - d with d = reference - logprob: unbiased, never negative (GRPO, arXiv 2402.03300, eq. 4), at most MAX_K3.

    The mean of its gradient is that of KL(reference || pi).
    """
    difference_R = (reference_R - logprob_R).clamp(max=MAX_LOG_RATIO)
    return (difference_R.expm1() - difference_R).clamp(max=MAX_K3)


MAX_ERROR = 0.2
"""Of a KL divergence from its target, relative: a larger one changes the weight no more."""


def adaptive_kl_coef(coef: float, kl: float, *, target: float, num_episodes: int, horizon: int) -> float:
    """The weight of the KL in the next step, after one of so many episodes (D. Ziegler et al., arXiv 1909.08593, section 2.2):
    coef * (1 + e * num_episodes / horizon), e = kl / target - 1, at most MAX_ERROR either way."""
    error = min(max(kl / target - 1.0, -MAX_ERROR), MAX_ERROR)
    return coef * (1.0 + error * num_episodes / horizon)


ESTIMATORS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""(logprob_R, reference_R) -> estimates of KL(pi || reference) at tokens drawn from pi (J. Schulman, "Approximating KL Divergence")."""
