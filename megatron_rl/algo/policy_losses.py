"""Policy losses: one function per algorithm that returns the loss of each sampled token.

In all of them r = exp(logprob - old) is a token's importance ratio, A its advantage, and sg() stops
gradients. Nothing here divides or weights: the objective multiplies by LossInputs.weight_R, and the
trainer divides once. On-policy (r = 1) the gradient of each is -A * grad(logprob), for gspo and
gmpo over all tokens of a sequence together.
"""

from collections.abc import Callable

import torch

from megatron_rl.algo.kl import MAX_LOG_RATIO
from megatron_rl.config import AlgoSettings
from megatron_rl.types import LossInputs

PolicyLossFn = Callable[[LossInputs, AlgoSettings], torch.Tensor]
"""(inputs, settings) -> loss of each sampled token [R]."""
ClipBounds = tuple[torch.Tensor, torch.Tensor]
"""Masks (bool, bool) of the tokens below and above an algorithm's bounds. Metrics count those with
an advantage that pushes them further out.
"""
MAX_DPPO_RATIO = 20.0
"""Cap on the importance ratio in `dppo`."""


def log_ratio(rows: LossInputs) -> torch.Tensor:
    """Return logprob - old logprob times the token's logprob scale, at most MAX_LOG_RATIO.

    The gradient is 0 above the cap.
    """
    return _scaled(rows.logprob_R - rows.old_logprob_R, rows).clamp(max=MAX_LOG_RATIO)


def _scaled(x_R: torch.Tensor, rows: LossInputs) -> torch.Tensor:
    return x_R if rows.logprob_scale_R is None else rows.logprob_scale_R * x_R


def ppo_clip(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return -min(r A, clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high) A): PPO's clipped loss.

    Sources: arXiv 1707.06347, eq. 7; DAPO's separate upper bound, arXiv 2503.14476, eq. 8.
    clip_ratio_c, if not 0, bounds the loss of a negative advantage by clip_ratio_c * |A| (dual
    clip, arXiv 1912.09729, eq. 5). The gradient is 0 where a bound is active.
    """
    return _clip(log_ratio(rows).exp(), rows.advantage_R, algo)


def gspo(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return GSPO's loss: `ppo_clip` with the ratio s = exp(mean of log r over the sequence).

    Source: arXiv 2507.18071, eq. 5 and 14. s_t = sg(s) * exp(logprob - sg(logprob)): with
    loss_agg_mode=sequence_mean, value and gradient are those of one ratio for the sequence.
    """
    mean_R = mean_by_id(log_ratio(rows).detach(), rows.sequence_R)
    return _clip((mean_R + _scaled(rows.logprob_R - rows.logprob_R.detach(), rows)).exp(), rows.advantage_R, algo)


def ppo_turn_clip(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return PPO's loss with one ratio per turn.

    The ratio is s = exp(sum of scale * (logprob - old) over the turn). Source: RL4VLM, arXiv
    2405.10292, section 4.3. Every token has its turn's value, which loss_agg_mode=turn_mean counts
    once.
    """
    return _clip(turn_log_ratio(rows).exp(), rows.advantage_R, algo)


def turn_log_ratio(rows: LossInputs) -> torch.Tensor:
    """Return the log-ratio of each token's whole turn, at most MAX_LOG_RATIO."""
    return sum_by_id(_scaled(rows.logprob_R - rows.old_logprob_R, rows), rows.turn_R).clamp(max=MAX_LOG_RATIO)


def cispo(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return -sg(clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)) A logprob: CISPO.

    Source: arXiv 2506.13585, eq. 4 and 5. Clipped tokens keep a gradient.
    """
    weight_R = log_ratio(rows).exp().clamp(1.0 - algo.clip_ratio_low, 1.0 + algo.clip_ratio_high).detach()
    return -weight_R * rows.advantage_R * _scaled(rows.logprob_R, rows)


def gmpo(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return GMPO's loss: -A exp(mean of k_t over the sequence).

    k_t = min(sign(A) log r, sign(A) clip(log r)) sign(A) (arXiv 2507.20673, eq. 4). The bounds are
    in log space: -clip_ratio_low and clip_ratio_high. Every token has its sequence's value, which
    loss_agg_mode=sequence_mean counts once.
    """
    sign_R, log_ratio_R = rows.advantage_R.sign(), log_ratio(rows)
    bounded_R = torch.minimum(sign_R * log_ratio_R, sign_R * log_ratio_R.clamp(-algo.clip_ratio_low, algo.clip_ratio_high))
    return -mean_by_id(rows.advantage_R, rows.sequence_R) * mean_by_id(sign_R * bounded_R, rows.sequence_R).exp()


def sapo(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return -(4 / tau) sigmoid(tau (r - 1)) A: SAPO, a soft gate instead of clipping.

    Source: arXiv 2511.20347. tau depends on the sign of A.
    """
    tau_R = torch.full_like(rows.advantage_R, algo.sapo_tau_negative).masked_fill(rows.advantage_R > 0, algo.sapo_tau_positive)
    return -4.0 / tau_R * torch.sigmoid(tau_R * (log_ratio(rows).exp() - 1.0)) * rows.advantage_R


def dppo(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return -sg(min(r, 20)) A logprob, masked where the probability moved too far: DPPO.

    Source: arXiv 2602.04879, with total variation. With p and q the probabilities now and at the
    start of the step, tokens are kept if A > 0 and p - q <= clip_ratio_high, or if A <= 0 and p - q
    >= -clip_ratio_low.
    """
    below_R, above_R = dppo_bounds(rows, algo)
    kept_R = torch.where(rows.advantage_R > 0, ~above_R, ~below_R)
    ratio_R = log_ratio(rows).exp().clamp(max=MAX_DPPO_RATIO).detach()
    return -ratio_R * rows.advantage_R * _scaled(rows.logprob_R, rows) * kept_R


def ratio_bounds(rows: LossInputs, algo: AlgoSettings) -> ClipBounds:
    """Return the tokens with a ratio below 1 - clip_ratio_low and above 1 + clip_ratio_high."""
    ratio_R = log_ratio(rows).exp()
    return ratio_R < 1.0 - algo.clip_ratio_low, ratio_R > 1.0 + algo.clip_ratio_high


def sequence_ratio_bounds(rows: LossInputs, algo: AlgoSettings) -> ClipBounds:
    """Return the bounds of `ratio_bounds` for the geometric mean ratio of each sequence."""
    ratio_R = mean_by_id(log_ratio(rows), rows.sequence_R).exp()
    return ratio_R < 1.0 - algo.clip_ratio_low, ratio_R > 1.0 + algo.clip_ratio_high


def turn_ratio_bounds(rows: LossInputs, algo: AlgoSettings) -> ClipBounds:
    """Return the bounds of `ratio_bounds` for the ratio of each turn."""
    ratio_R = turn_log_ratio(rows).exp()
    return ratio_R < 1.0 - algo.clip_ratio_low, ratio_R > 1.0 + algo.clip_ratio_high


def log_ratio_bounds(rows: LossInputs, algo: AlgoSettings) -> ClipBounds:
    """Return the tokens with a log-ratio below -clip_ratio_low and above clip_ratio_high."""
    log_ratio_R = log_ratio(rows)
    return log_ratio_R < -algo.clip_ratio_low, log_ratio_R > algo.clip_ratio_high


def dppo_bounds(rows: LossInputs, algo: AlgoSettings) -> ClipBounds:
    """Return the tokens with probability changes below -clip_ratio_low or above clip_ratio_high."""
    moved_R = rows.logprob_R.exp() - rows.old_logprob_R.exp()
    return moved_R < -algo.clip_ratio_low, moved_R > algo.clip_ratio_high


def no_bounds(rows: LossInputs, algo: AlgoSettings) -> ClipBounds:
    """Return empty masks, for a policy loss without bounds."""
    inside_R = torch.zeros_like(rows.sequence_R, dtype=torch.bool)
    return inside_R, inside_R


def mean_by_id(x_R: torch.Tensor, segment_R: torch.Tensor) -> torch.Tensor:
    """Return the mean over the tokens of each sequence, at each of its tokens."""
    return sum_by_id(x_R, segment_R) / sum_by_id(torch.ones_like(x_R), segment_R)


def sum_by_id(x_R: torch.Tensor, segment_R: torch.Tensor) -> torch.Tensor:
    """Return the sum over the tokens of each sequence (or turn), at each of its tokens.

    The buffer has one slot per token, because reading the number of sequences from the device would
    block the host.
    """
    place_R = (segment_R.diff(prepend=segment_R[:1]) != 0).cumsum(0)
    return torch.zeros_like(x_R).index_add(0, place_R, x_R)[place_R]


def _clip(ratio_R: torch.Tensor, advantage_R: torch.Tensor, algo: AlgoSettings) -> torch.Tensor:
    bounded_R = ratio_R.clamp(1.0 - algo.clip_ratio_low, 1.0 + algo.clip_ratio_high)
    loss_R = -torch.minimum(ratio_R * advantage_R, bounded_R * advantage_R)
    if algo.clip_ratio_c == 0:
        return loss_R
    return torch.where(advantage_R < 0, torch.minimum(loss_R, -algo.clip_ratio_c * advantage_R), loss_R)
