"""What is done about engine and trainer giving a token different probabilities (bfloat16, kernels): constant weights on the surrogate.

They multiply the surrogate, never the KL or the entropy term, and leave the denominator as it is. rho = exp(old - engine logprob).
"""

from collections.abc import Callable, Mapping

import torch

from megatron_rl.algo.kl import MAX_LOG_RATIO
from megatron_rl.config import AlgoSettings
from megatron_rl.types import Rows


def none(rows: Rows, algo: AlgoSettings) -> torch.Tensor:
    """Trust the engine's sampling: every token counts in full."""
    return torch.ones_like(rows.old_R)


def token_tis(rows: Rows, algo: AlgoSettings) -> torch.Tensor:
    """Truncated importance sampling by token: min(rho, correction_cap) (F. Yao et al., "Your efficient RL framework secretly brings you
    off-policy RL training", 2025; verl's rollout_is=token)."""
    return (rows.old_R - rows.engine_R).clamp(max=MAX_LOG_RATIO).exp().clamp(max=algo.correction_cap)


CORRECTIONS: Mapping[str, Callable[[Rows, AlgoSettings], torch.Tensor]] = {"none": none, "token_tis": token_tis}
