"""Divergences between the next-token distributions of the policy and a teacher.

p is the policy's distribution and q the teacher's, both over the same outcomes at the sampling
temperature. A divergence is a sum over the outcomes, D = sum of f. Its gradient with respect to the
policy's log-probabilities, g = dD / d log p, determines the gradient of the logits,
dD / d logit_v = (g_v - p_v * sum of g) / temperature.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from megatron_rl.config import DistillSettings

DivergenceFn = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
"""(log p, log q) -> f and g, elementwise, and with a clip the mask of the clipped terms. Constant
multiples of p in g have no effect and are left out.
"""


def reverse_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the terms of KL(p || q): f = g = p (log p - log q)."""
    term = log_p.exp() * (log_p - log_q)
    return term, term


def forward_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the terms of KL(q || p): f = q (log q - log p), g = -q."""
    q = log_q.exp()
    return q * (log_q - log_p), -q


def jsd(log_p: torch.Tensor, log_q: torch.Tensor, *, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the terms of the generalized Jensen-Shannon divergence with the mixture m.

    f = beta * q (log q - log m) + (1 - beta) * p (log p - log m) with m = beta q + (1 - beta) p,
    and g = (1 - beta) p (log p - log m). Source: arXiv 2306.13649 (GKD), eq. 1.
    """
    weights = torch.tensor([beta, 1 - beta], dtype=log_p.dtype, device=log_p.device).log()
    log_m = torch.logaddexp(log_q + weights[0], log_p + weights[1])
    of_policy = (1 - beta) * log_p.exp() * (log_p - log_m)
    return beta * log_q.exp() * (log_q - log_m) + of_policy, of_policy


DIVERGENCES: Mapping[str, Callable[[DistillSettings], DivergenceFn]] = {
    "reverse_kl": lambda _distill: reverse_kl,
    "forward_kl": lambda _distill: forward_kl,
    "jsd": lambda distill: partial(jsd, beta=distill.jsd_beta),
}
"""Functions that return a divergence with its constants, keyed by distill.divergence."""
OMITTED = {"reverse_kl": 1.0, "forward_kl": 0.0, "jsd": 0.0}
"""Multiple of p that g leaves out, keyed by distill.divergence."""


def clip_terms(log_p: torch.Tensor, log_q: torch.Tensor, *, terms: DivergenceFn, limit: float, omitted: float) -> tuple[torch.Tensor, ...]:
    """Return the terms min(f, limit) of a divergence, their g, and the mask of the clipped terms.

    With c = `omitted`, the derivative of an unclipped term is g + c p, and that of a clipped one is
    0. The multiple c p of all outcomes is left out again, so that g of a clipped term is -c p.
    """
    term, grad = terms(log_p, log_q)
    is_clipped = term > limit
    return term.clamp(max=limit), grad.where(~is_clipped, -omitted * log_p.exp()), is_clipped


def make_divergence(distill: DistillSettings) -> DivergenceFn:
    """Return the divergence of the settings, with its constants and its clip."""
    terms = DIVERGENCES[distill.divergence](distill)
    return partial(clip_terms, terms=terms, limit=distill.clip, omitted=OMITTED[distill.divergence]) if distill.clip else terms
