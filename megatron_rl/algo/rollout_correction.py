"""What is done about an engine that gave a token another probability than the trainer does: other kernels, bfloat16, older weights.

algo.correction names rows of CORRECTIONS, joined by +. Each gives every sampled token a constant weight; weights multiply each other and
the surrogate, never the KL or the entropy term. The denominator stays as it is: what is masked keeps its share.

r = exp(old - engine logprob) of a token; old is the trainer's logprob at the start of the step (decoupled PPO, arXiv 2110.00641) and with
bypass the current one. A sequence is a context or, with algo.correction_over=turns, a turn; neither is ever cut, and no sampled token is in
two. Every log r, and the sum over a sequence, is held within MAX_LOG_RATIO of 0. Where r = 1 everywhere all weights are 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megatron_rl.algo.kl import MAX_LOG_RATIO
from megatron_rl.algo.policy_losses import segment_mean, segment_sum
from megatron_rl.config import AlgoSettings, Settings, require, require_choice
from megatron_rl.types import Rows


def uncorrected(settings: Settings) -> list[str]:
    """A line each for why what was sampled is not quite what is trained, where nothing is done about it: engine and trainer round
    differently in bfloat16, and weights may be older."""
    rounds, staleness = "bfloat16" in (settings.model.dtype, settings.engine.dtype), settings.run.max_staleness
    correction, lines = settings.algo.correction, []
    if settings.stage != "rl" or correction not in ("none", "opsm"):  # opsm lets all pass but what has drifted far
        return lines
    if staleness > 0:
        told = "trains on what older weights sampled, which may end in collapse; use algo.correction=bypass, and a lower learning rate"
        lines.append(f"algo.correction={correction}: run.max_staleness={staleness} {told}")
    if rounds:
        told = "engine and trainer round to bfloat16 differently; use algo.correction=token_tis, and watch engine/logprob_gap"
        lines.append(f"algo.correction={correction}: {told}")
    return lines


def one(rows: Rows, algo: AlgoSettings) -> torch.Tensor:
    """Every token counts in full. none trusts the engine's sampling. With bypass (verl's bypass_mode) the ratio is in the surrogate, which
    compares with the engine's logprob in place of the old one: the forward pass for old logprobs is left out."""
    return torch.ones_like(rows.old_R)


def token_tis(rows: Rows, algo: AlgoSettings) -> torch.Tensor:
    """min(r, correction_cap): truncated importance sampling by token (F. Yao et al., "Your efficient RL framework secretly brings you
    off-policy RL training", 2025; verl's rollout_is=token, TRL's token_truncate)."""
    return _log_r(rows).exp().clamp(max=algo.correction_cap)


def sequence_tis(rows: Rows, algo: AlgoSettings) -> torch.Tensor:
    """min(S, correction_cap), S the product of r over the sequence (verl's rollout_is=sequence, TRL's sequence_truncate)."""
    return _product(rows, algo).clamp(max=algo.correction_cap)


def token_mask(rows: Rows, algo: AlgoSettings) -> torch.Tensor:
    """r where token_mask_low <= r <= token_mask_high, else 0: IcePop (arXiv 2510.18855)."""
    ratio_R = _log_r(rows).exp()
    return ratio_R * _within(ratio_R, algo.token_mask_low, algo.token_mask_high)


def sequence_mask(rows: Rows, algo: AlgoSettings) -> torch.Tensor:
    """S where sequence_mask_low <= S <= sequence_mask_high, else 0 for the whole sequence: masked importance sampling (TRL's default)."""
    product_R = _product(rows, algo)
    return product_R * _within(product_R, algo.sequence_mask_low, algo.sequence_mask_high)


def geo_mask(rows: Rows, algo: AlgoSettings) -> torch.Tensor:
    """1 where geo_mask_low <= exp(mean of log r over the sequence) <= geo_mask_high, else 0 (verl's rollout_rs=seq_mean_k1)."""
    return _within(_mean(_log_r(rows), rows, algo).exp(), algo.geo_mask_low, algo.geo_mask_high)


def k3_mask(rows: Rows, algo: AlgoSettings) -> torch.Tensor:
    """1 where the mean of r - 1 - log r over the sequence, which estimates KL(engine || old), is at most k3_mask_high, else 0 (verl's
    rollout_rs=seq_mean_k3)."""
    log_r_R = _log_r(rows)
    return _within(_mean(log_r_R.expm1() - log_r_R, rows, algo), 0.0, algo.k3_mask_high)


def opsm(rows: Rows, algo: AlgoSettings) -> torch.Tensor:
    """0 where the advantage is negative and the mean of engine logprob - logprob over the sequence is above opsm_delta, else 1: off-policy
    sequence masking (DeepSeek-V3.2, arXiv 2512.02556). It is the current logprob that counts, in every update."""
    drift_R = _mean(_held(rows.engine_R - rows.logprob_R), rows, algo)
    return ((rows.advantage_R >= 0) | (drift_R <= algo.opsm_delta)).to(rows.old_R.dtype)


def _log_r(rows: Rows) -> torch.Tensor:
    return _held(rows.old_R - rows.engine_R)


def _held(x_R: torch.Tensor) -> torch.Tensor:
    return x_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _product(rows: Rows, algo: AlgoSettings) -> torch.Tensor:
    """Of r over the sequence, at each of its tokens."""
    return _held(segment_sum(_log_r(rows), _sequence(rows, algo))).exp()


def _mean(x_R: torch.Tensor, rows: Rows, algo: AlgoSettings) -> torch.Tensor:
    return segment_mean(x_R, _sequence(rows, algo))


def _sequence(rows: Rows, algo: AlgoSettings) -> torch.Tensor:
    return rows.turn_R if algo.correction_over == "turns" else rows.context_R


def _within(x_R: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """1 or 0."""
    return ((x_R >= low) & (x_R <= high)).to(x_R.dtype)


@dataclass(slots=True, frozen=True)
class Correction:
    weigh: Callable[[Rows, AlgoSettings], torch.Tensor]
    has_ratio: bool = False
    """The importance ratio comes with it: one row of these at a time."""
    truncates: bool = False
    """Its weights end at correction_cap."""
    by_sequence: bool = False
    """algo.correction_over matters."""


CORRECTIONS: Mapping[str, Correction] = {
    "none": Correction(one),
    "bypass": Correction(one, has_ratio=True),
    "token_tis": Correction(token_tis, has_ratio=True, truncates=True),
    "sequence_tis": Correction(sequence_tis, has_ratio=True, truncates=True, by_sequence=True),
    "token_mask": Correction(token_mask, has_ratio=True),
    "sequence_mask": Correction(sequence_mask, has_ratio=True, by_sequence=True),
    "geo_mask": Correction(geo_mask, by_sequence=True),
    "k3_mask": Correction(k3_mask, by_sequence=True),
    "opsm": Correction(opsm, by_sequence=True),
}


def named(algo: AlgoSettings) -> list[str]:
    """The rows that algo.correction joins."""
    return algo.correction.split("+")


def check_correction(algo: AlgoSettings) -> None:
    """ValueError: a row that is in no table, or rows that do not go together."""
    names = named(algo)
    for name in names:
        require_choice("algo.correction", name, tuple(CORRECTIONS))
    require(len(set(names)) == len(names), "algo.correction", algo.correction, "names a row twice; name it once")
    require(len(names) == 1 or "none" not in names, "algo.correction", algo.correction, "none goes with no other row; leave it out")
    ratios = [name for name in names if CORRECTIONS[name].has_ratio]
    remedy = f"{' and '.join(ratios)} would each count the importance ratio; keep one of them"
    require(len(ratios) <= 1, "algo.correction", algo.correction, remedy)
    remedy = f"algo.correction={algo.correction} looks at no sequence; use contexts"
    require(
        algo.correction_over == "contexts" or any(CORRECTIONS[name].by_sequence for name in names),
        "algo.correction_over", algo.correction_over, remedy,
    )  # fmt: skip


def bypasses(algo: AlgoSettings) -> bool:
    """The surrogate compares with the engine's logprob, and old ones are not asked for."""
    return "bypass" in named(algo)


@torch.no_grad()
def correct(rows: Rows, algo: AlgoSettings) -> torch.Tensor:
    """The weight of each token's surrogate."""
    weight_R = torch.ones_like(rows.old_R)
    for name in named(algo):
        weight_R = weight_R * CORRECTIONS[name].weigh(rows, algo)
    return weight_R


def measure_importance(rows: Rows) -> dict[str, torch.Tensor]:
    """Sums over tokens of r and of its square: what the tokens of older weights are worth where nothing corrects them."""
    ratio_R = _log_r(rows).exp()
    return {"engine/importance": ratio_R.sum(), "engine/importance_squared": ratio_R.square().sum()}


def measure_correction(rows: Rows, correction_R: torch.Tensor, algo: AlgoSettings) -> dict[str, torch.Tensor]:
    """Sums over tokens of what `correct` said: weights (with bypass times r, which is in the surrogate), their squares, and how many tokens
    were truncated and masked."""
    truncates = any(CORRECTIONS[name].truncates for name in named(algo))
    weight_R = correction_R * _log_r(rows).exp() if bypasses(algo) else correction_R
    chosen = {
        "engine/truncated_fraction": (correction_R >= algo.correction_cap) & truncates,
        "engine/masked_fraction": correction_R == 0,
    }
    sums = {"engine/correction": weight_R.sum(), "engine/correction_squared": weight_R.square().sum()}
    return sums | {name: each_R.to(weight_R.dtype).sum() for name, each_R in chosen.items()}
