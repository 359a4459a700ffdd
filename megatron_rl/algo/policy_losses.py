"""Policy losses, which return one loss value per sampled token.

Notation: r = exp(logprob - old logprob) is the importance ratio of a token, A is the advantage of
the token, and sg() stops gradients. The objective multiplies the losses by
LossInputs.weight_R, and the trainer divides their sum by the global denominator.

If r = 1 (on-policy), the gradient of a token's policy loss is -A * grad(logprob). For gspo and
gmpo, this equality holds only for the sum over a sequence.
"""

from collections.abc import Callable

import torch

from megatron_rl.algo.kl import MAX_LOG_RATIO
from megatron_rl.config import AlgoSettings
from megatron_rl.types import LossInputs

PolicyLossFn = Callable[[LossInputs, AlgoSettings], torch.Tensor]
"""(inputs, settings) -> loss for each sampled token [R]."""
ClipBounds = tuple[torch.Tensor, torch.Tensor]
"""Two bool masks [R]: tokens below the algorithm's lower bound and tokens above the upper bound.
The clip fractions include only tokens with an advantage that pushes the ratio further beyond the
bound.
"""
MAX_DPPO_RATIO = 20.0
"""Upper bound on the importance ratio in `dppo`."""


def log_ratio(rows: LossInputs) -> torch.Tensor:
    """Return (logprob - old logprob) * logprob_scale, capped at MAX_LOG_RATIO.

    The gradient is 0 above the cap.
    """
    return _scaled(rows.logprob_R - rows.old_logprob_R, rows).clamp(max=MAX_LOG_RATIO)


def _scaled(x_R: torch.Tensor, rows: LossInputs) -> torch.Tensor:
    return x_R if rows.logprob_scale_R is None else rows.logprob_scale_R * x_R


def ppo_clip(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return PPO's clipped loss: -min(r A, clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high) A).

    Sources: arXiv 1707.06347, eq. 7; DAPO's separate upper bound, arXiv 2503.14476, eq. 8. If
    clip_ratio_c is not 0, the loss of a token with a negative advantage is at most clip_ratio_c *
    |A| (dual clip, arXiv 1912.09729, eq. 5). The gradient is 0 where a bound is active.
    """
    return _clip(log_ratio(rows).exp(), rows.advantage_R, algo)


def gspo(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return GSPO's loss (`ppo_clip` with the ratio s = exp(mean of log r over the sequence)).

    Source: arXiv 2507.18071, eq. 5 and 14. The ratio of token t is s_t = sg(s) * exp(logprob -
    sg(logprob)). With loss_agg_mode=sequence_mean, the loss has the same value and gradient as with
    one ratio s per sequence.
    """
    mean_R = mean_by_id(log_ratio(rows).detach(), rows.sequence_R)
    return _clip((mean_R + _scaled(rows.logprob_R - rows.logprob_R.detach(), rows)).exp(), rows.advantage_R, algo)


def ppo_turn_clip(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return PPO's clipped loss with one importance ratio per turn.

    The ratio is s = exp(sum of logprob_scale * (logprob - old logprob) over the turn). Source:
    arXiv 2405.10292, section 4.3 (RL4VLM). All tokens of a turn have the same loss value, and
    loss_agg_mode=turn_mean counts this value once per turn.
    """
    return _clip(turn_log_ratio(rows).exp(), rows.advantage_R, algo)


def turn_log_ratio(rows: LossInputs) -> torch.Tensor:
    """Return, for each token, the summed log-ratio of its turn, capped at MAX_LOG_RATIO."""
    return sum_by_id(_scaled(rows.logprob_R - rows.old_logprob_R, rows), rows.turn_R).clamp(max=MAX_LOG_RATIO)


def cispo(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return CISPO's loss: -sg(clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)) A logprob.

    Source: arXiv 2506.13585, eq. 4 and 5. Tokens with a clipped ratio still contribute to the
    gradient.
    """
    weight_R = log_ratio(rows).exp().clamp(1.0 - algo.clip_ratio_low, 1.0 + algo.clip_ratio_high).detach()
    return -weight_R * rows.advantage_R * _scaled(rows.logprob_R, rows)


def gmpo(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return GMPO's loss: -A exp(mean of k_t over the sequence).

    k_t = min(sign(A) log r, sign(A) clip(log r)) sign(A) (arXiv 2507.20673, eq. 4). clip() has the
    bounds -clip_ratio_low and clip_ratio_high, in log space. All tokens of a sequence have the same
    loss value, and loss_agg_mode=sequence_mean counts this value once per sequence.
    """
    sign_R, log_ratio_R = rows.advantage_R.sign(), log_ratio(rows)
    bounded_R = torch.minimum(sign_R * log_ratio_R, sign_R * log_ratio_R.clamp(-algo.clip_ratio_low, algo.clip_ratio_high))
    return -mean_by_id(rows.advantage_R, rows.sequence_R) * mean_by_id(sign_R * bounded_R, rows.sequence_R).exp()


def sapo(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return SAPO's loss, a soft gate instead of clipping: -(4 / tau) sigmoid(tau (r - 1)) A.

    Source: arXiv 2511.20347. tau is sapo_tau_positive if A > 0, else sapo_tau_negative.
    """
    tau_R = torch.full_like(rows.advantage_R, algo.sapo_tau_negative).masked_fill(rows.advantage_R > 0, algo.sapo_tau_positive)
    return -4.0 / tau_R * torch.sigmoid(tau_R * (log_ratio(rows).exp() - 1.0)) * rows.advantage_R


def dppo(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return DPPO's loss: -sg(min(r, MAX_DPPO_RATIO)) A logprob, or 0 outside the trust region.

    Source: arXiv 2602.04879 (the variant with total-variation divergence). Let p be the token's
    current probability, and let q be its probability at the start of the step. The token is inside
    the trust region if A > 0 and p - q <= clip_ratio_high, or if A <= 0 and
    p - q >= -clip_ratio_low.
    """
    below_R, above_R = dppo_bounds(rows, algo)
    kept_R = torch.where(rows.advantage_R > 0, ~above_R, ~below_R)
    ratio_R = log_ratio(rows).exp().clamp(max=MAX_DPPO_RATIO).detach()
    return -ratio_R * rows.advantage_R * _scaled(rows.logprob_R, rows) * kept_R


def ratio_bounds(rows: LossInputs, algo: AlgoSettings) -> ClipBounds:
    """Return two masks: tokens with r < 1 - clip_ratio_low and with r > 1 + clip_ratio_high."""
    ratio_R = log_ratio(rows).exp()
    return ratio_R < 1.0 - algo.clip_ratio_low, ratio_R > 1.0 + algo.clip_ratio_high


def sequence_ratio_bounds(rows: LossInputs, algo: AlgoSettings) -> ClipBounds:
    """Return masks like `ratio_bounds`, but for the geometric mean of r over each sequence."""
    ratio_R = mean_by_id(log_ratio(rows), rows.sequence_R).exp()
    return ratio_R < 1.0 - algo.clip_ratio_low, ratio_R > 1.0 + algo.clip_ratio_high


def turn_ratio_bounds(rows: LossInputs, algo: AlgoSettings) -> ClipBounds:
    """Return masks like `ratio_bounds`, but for the importance ratio of each turn."""
    ratio_R = turn_log_ratio(rows).exp()
    return ratio_R < 1.0 - algo.clip_ratio_low, ratio_R > 1.0 + algo.clip_ratio_high


def log_ratio_bounds(rows: LossInputs, algo: AlgoSettings) -> ClipBounds:
    """Return two masks: tokens with log r < -clip_ratio_low and with log r > clip_ratio_high."""
    log_ratio_R = log_ratio(rows)
    return log_ratio_R < -algo.clip_ratio_low, log_ratio_R > algo.clip_ratio_high


def dppo_bounds(rows: LossInputs, algo: AlgoSettings) -> ClipBounds:
    """Return two masks: tokens with p - q < -clip_ratio_low and with p - q > clip_ratio_high.

    p is the token's current probability, and q is its probability at the start of the step.
    """
    moved_R = rows.logprob_R.exp() - rows.old_logprob_R.exp()
    return moved_R < -algo.clip_ratio_low, moved_R > algo.clip_ratio_high


def no_bounds(rows: LossInputs, algo: AlgoSettings) -> ClipBounds:
    """Return all-False masks, for a policy loss without bounds."""
    inside_R = torch.zeros_like(rows.sequence_R, dtype=torch.bool)
    return inside_R, inside_R


def mean_by_id(x_R: torch.Tensor, segment_R: torch.Tensor) -> torch.Tensor:
    """Return, for each token, the mean over all tokens with the same sequence or turn index."""
    return sum_by_id(x_R, segment_R) / sum_by_id(torch.ones_like(x_R), segment_R)


def sum_by_id(x_R: torch.Tensor, segment_R: torch.Tensor) -> torch.Tensor:
    """Return, for each token, the sum over all tokens with the same sequence or turn index.

    The buffer for the sums has one element per token. A smaller buffer would require reading the
    number of sequences from the device, which blocks the host.
    """
    place_R = (segment_R.diff(prepend=segment_R[:1]) != 0).cumsum(0)
    return torch.zeros_like(x_R).index_add(0, place_R, x_R)[place_R]


def _clip(ratio_R: torch.Tensor, advantage_R: torch.Tensor, algo: AlgoSettings) -> torch.Tensor:
    bounded_R = ratio_R.clamp(1.0 - algo.clip_ratio_low, 1.0 + algo.clip_ratio_high)
    loss_R = -torch.minimum(ratio_R * advantage_R, bounded_R * advantage_R)
    if algo.clip_ratio_c == 0:
        return loss_R
    return torch.where(advantage_R < 0, torch.minimum(loss_R, -algo.clip_ratio_c * advantage_R), loss_R)
