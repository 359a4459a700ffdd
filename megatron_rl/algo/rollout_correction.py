"""Importance-sampling weights that correct the mismatch between rollout engine and trainer.

Engine and trainer assign different probabilities to a token because of different kernels, bfloat16
rounding or older weights. algo.rollout_correction is a list of rollout corrections (keys of
CORRECTIONS), joined by +. Each correction computes one weight per sampled token, without gradient.
The product of the weights multiplies the policy loss, but not the KL or entropy term. Masked tokens
still count towards the denominator of the loss.

Notation: r = exp(old logprob - engine logprob) for a token. The old logprob is the trainer's
logprob at the start of the step (decoupled PPO, arXiv 2110.00641) or, with bypass, the trainer's
current logprob. A "sequence" in this module is a token sequence or, with
algo.rollout_correction_level=turns, a turn. Sequences and turns are never split across
micro-batches, and every sampled token belongs to exactly one sequence and one turn. log r of a
token and the sum of log r over a sequence are clamped to [-MAX_LOG_RATIO, MAX_LOG_RATIO]. If r = 1
for all tokens, all weights are 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megatron_rl.algo.kl import MAX_LOG_RATIO
from megatron_rl.algo.policy_losses import mean_by_id, sum_by_id
from megatron_rl.config import AlgoSettings, Settings, require, require_choice
from megatron_rl.types import LossInputs


def mismatch_warnings(settings: Settings) -> list[str]:
    """Return a warning for each source of mismatch that is not handled by a configured correction.

    There are two sources of mismatch. Tokens may have been sampled by older weights
    (run.max_staleness). Engine and trainer round to bfloat16 differently.
    """
    rounds, staleness = "bfloat16" in (settings.model.dtype, settings.engine.dtype), settings.run.max_staleness
    correction, lines = settings.algo.rollout_correction, []
    if settings.stage != "rl" or correction not in ("none", "opsm"):  # opsm masks only sequences that drifted far
        return lines
    if staleness > 0:
        told = (
            "trains on tokens sampled by older weights, which may cause collapse; "
            "use algo.rollout_correction=bypass, and a lower learning rate"
        )
        lines.append(f"algo.rollout_correction={correction}: run.max_staleness={staleness} {told}")
    if rounds:
        remedy = "use algo.rollout_correction=token_tis, and watch rollout_mismatch/logprob_abs_diff"
        told = f"engine and trainer round to bfloat16 differently; {remedy}"
        lines.append(f"algo.rollout_correction={correction}: {told}")
    return lines


def no_weight(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return weight 1 for every token.

    With the correction "none", the mismatch is not corrected. With the correction "bypass"
    (bypass_mode in verl), the policy loss uses the engine's logprobs in place of old logprobs, so
    the forward pass for old logprobs is skipped.
    """
    return torch.ones_like(rows.old_logprob_R)


def token_tis(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return min(r, is_weight_cap): truncated importance sampling per token.

    Source: "Your efficient RL framework secretly brings you off-policy RL training" (Yao et al.,
    2025). Equivalent to rollout_is=token in verl and to token_truncate in TRL.
    """
    return _train_rollout_log_ratio(rows).exp().clamp(max=algo.is_weight_cap)


def sequence_tis(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return min(S, is_weight_cap), where S is the product of r over the sequence.

    Equivalent to rollout_is=sequence in verl and to sequence_truncate in TRL.
    """
    return _sequence_ratio(rows, algo).clamp(max=algo.is_weight_cap)


def token_mask(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return r if token_mask_low <= r <= token_mask_high, else 0 (IcePop, arXiv 2510.18855)."""
    ratio_R = _train_rollout_log_ratio(rows).exp()
    return ratio_R * _within(ratio_R, algo.token_mask_low, algo.token_mask_high)


def sequence_mask(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return S, the product of r over the sequence, or 0 if S is out of bounds.

    S is in bounds if sequence_mask_low <= S <= sequence_mask_high. TRL uses sequence-level masked
    importance sampling by default.
    """
    product_R = _sequence_ratio(rows, algo)
    return product_R * _within(product_R, algo.sequence_mask_low, algo.sequence_mask_high)


def geo_mask(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return 1 if geo_mask_low <= exp(mean of log r over the sequence) <= geo_mask_high, else 0.

    Equivalent to rollout_rs=seq_mean_k1 in verl.
    """
    return _within(_sequence_mean(_train_rollout_log_ratio(rows), rows, algo).exp(), algo.geo_mask_low, algo.geo_mask_high)


def k3_mask(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return 1 if the mean of r - 1 - log r over the sequence is at most k3_mask_high, else 0.

    The mean estimates KL(engine || old policy). Equivalent to rollout_rs=seq_mean_k3 in verl.
    """
    log_r_R = _train_rollout_log_ratio(rows)
    return _within(_sequence_mean(log_r_R.expm1() - log_r_R, rows, algo), 0.0, algo.k3_mask_high)


def opsm(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return 0 if the advantage is negative and the sequence's drift exceeds opsm_delta, else 1.

    The drift is the mean of (engine logprob - current logprob) over the sequence, recomputed in
    every update. Source: off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556.
    """
    drift_R = _sequence_mean(_clamp_log_ratio(rows.rollout_logprob_R - rows.logprob_R), rows, algo)
    return ((rows.advantage_R >= 0) | (drift_R <= algo.opsm_delta)).to(rows.old_logprob_R.dtype)


def _train_rollout_log_ratio(rows: LossInputs) -> torch.Tensor:
    return _clamp_log_ratio(rows.old_logprob_R - rows.rollout_logprob_R)


def _clamp_log_ratio(x_R: torch.Tensor) -> torch.Tensor:
    return x_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _sequence_ratio(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return, for each token, the product of r over the token's sequence."""
    return _clamp_log_ratio(sum_by_id(_train_rollout_log_ratio(rows), _sequence_ids(rows, algo))).exp()


def _sequence_mean(x_R: torch.Tensor, rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    return mean_by_id(x_R, _sequence_ids(rows, algo))


def _sequence_ids(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    return rows.turn_R if algo.rollout_correction_level == "turns" else rows.sequence_R


def _within(x_R: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return 1 where low <= x <= high, else 0."""
    return ((x_R >= low) & (x_R <= high)).to(x_R.dtype)


@dataclass(slots=True, frozen=True)
class Correction:
    """Method of rollout correction: a weight function, and flags that describe it."""

    weight_fn: Callable[[LossInputs, AlgoSettings], torch.Tensor]
    has_ratio: bool = False
    """True if the correction applies the importance ratio r. At most one of the configured
    corrections may apply r.
    """
    truncates: bool = False
    """True if the weights are capped at is_weight_cap."""
    by_sequence: bool = False
    """True if the weight depends on algo.rollout_correction_level."""


CORRECTIONS: Mapping[str, Correction] = {
    "none": Correction(no_weight),
    "bypass": Correction(no_weight, has_ratio=True),
    "token_tis": Correction(token_tis, has_ratio=True, truncates=True),
    "sequence_tis": Correction(sequence_tis, has_ratio=True, truncates=True, by_sequence=True),
    "token_mask": Correction(token_mask, has_ratio=True),
    "sequence_mask": Correction(sequence_mask, has_ratio=True, by_sequence=True),
    "geo_mask": Correction(geo_mask, by_sequence=True),
    "k3_mask": Correction(k3_mask, by_sequence=True),
    "opsm": Correction(opsm, by_sequence=True),
}
"""Rollout corrections, keyed by their name in algo.rollout_correction."""


def correction_names(algo: AlgoSettings) -> list[str]:
    """Return the correction names in algo.rollout_correction, which are joined by +."""
    return algo.rollout_correction.split("+")


def check_correction(algo: AlgoSettings) -> None:
    """Raise ValueError if corrections are unknown, repeated or incompatible with each other."""
    names = correction_names(algo)
    for name in names:
        require_choice("algo.rollout_correction", name, tuple(CORRECTIONS))
    require(
        len(set(names)) == len(names),
        "algo.rollout_correction",
        algo.rollout_correction,
        "contains a duplicate name; list each correction once",
    )
    require(
        len(names) == 1 or "none" not in names,
        "algo.rollout_correction",
        algo.rollout_correction,
        "'none' cannot be combined with other corrections; remove 'none'",
    )
    ratios = [name for name in names if CORRECTIONS[name].has_ratio]
    remedy = f"{' and '.join(ratios)} would each apply the importance ratio; keep one of them"
    require(len(ratios) <= 1, "algo.rollout_correction", algo.rollout_correction, remedy)
    remedy = f"algo.rollout_correction={algo.rollout_correction} contains no sequence-level correction; use sequences"
    require(
        algo.rollout_correction_level == "sequences" or any(CORRECTIONS[name].by_sequence for name in names),
        "algo.rollout_correction_level", algo.rollout_correction_level, remedy,
    )  # fmt: skip


def bypasses(algo: AlgoSettings) -> bool:
    """Return True if the policy loss uses the engine's logprobs in place of old logprobs."""
    return "bypass" in correction_names(algo)


@torch.no_grad()
def compute_is_weights(rows: LossInputs, algo: AlgoSettings) -> torch.Tensor:
    """Return the importance-sampling weight for each token's policy loss."""
    weight_R = torch.ones_like(rows.old_logprob_R)
    for name in correction_names(algo):
        weight_R = weight_R * CORRECTIONS[name].weight_fn(rows, algo)
    return weight_R


def importance_metrics(rows: LossInputs) -> dict[str, torch.Tensor]:
    """Return the sums of r and r^2 over all tokens, as metrics for steps without a correction.

    The sums of r and r^2 determine the effective sample size, which decreases when r varies more
    between tokens.
    """
    ratio_R = _train_rollout_log_ratio(rows).exp()
    return {"rollout_mismatch/importance": ratio_R.sum(), "rollout_mismatch/importance_squared": ratio_R.square().sum()}


def correction_metrics(rows: LossInputs, correction_R: torch.Tensor, algo: AlgoSettings) -> dict[str, torch.Tensor]:
    """Return the sums of weights and squared weights, and counts of truncated and masked tokens.

    `correction_R` is the result of `compute_is_weights`. With bypass, the policy loss itself
    contains r, so the reported weights are `correction_R` times r.
    """
    truncates = any(CORRECTIONS[name].truncates for name in correction_names(algo))
    weight_R = correction_R * _train_rollout_log_ratio(rows).exp() if bypasses(algo) else correction_R
    chosen = {
        "rollout_mismatch/is_truncated_fraction": (correction_R >= algo.is_weight_cap) & truncates,
        "rollout_mismatch/masked_fraction": correction_R == 0,
    }
    sums = {"rollout_mismatch/is_weight": weight_R.sum(), "rollout_mismatch/is_weight_squared": weight_R.square().sum()}
    return sums | {name: each_R.to(weight_R.dtype).sum() for name, each_R in chosen.items()}
