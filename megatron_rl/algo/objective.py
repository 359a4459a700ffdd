"""Builds an algorithm's loss function, which returns the loss and metrics.

A loss is a sum over the tokens of a micro-batch. The trainer divides this sum by one global
integer, so the gradient does not depend on how the batch is split into micro-batches.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from megatron_rl.algo.algorithms import ALGORITHMS, Algorithm
from megatron_rl.algo.distill import DistillTerm
from megatron_rl.algo.kl import ESTIMATORS, k3
from megatron_rl.algo.policy_losses import ClipBounds, log_ratio
from megatron_rl.algo.rollout_correction import bypasses, compute_is_weights, correction_metrics, importance_metrics
from megatron_rl.config import AlgoSettings
from megatron_rl.io.histogram import count_in_bins
from megatron_rl.types import Loss, LossInputs, LossMetrics

DATA_METRICS = ("distill/data_divergence", "distill/data_tokens")
RESPONSE_METRICS = ("distill/response_nll", "distill/response_tokens")
"""Metrics of demonstrations, and of the teacher's responses: the sum of their term, and the number
of their tokens.
"""


def make_policy_objective(
    algo: AlgoSettings, algorithms: Mapping[str, Algorithm] = ALGORITHMS, *, distill: DistillTerm | None = None
) -> Loss:
    """Return the policy loss function of the configured algorithm.

    The loss is the sum over sampled tokens of weight * (correction * policy_loss + kl_coef * KL -
    entropy_coef * entropy + distill_coef * divergence); see GRPO, arXiv 2402.03300, eq. 3, and
    `DistillTerm` for the last term. With algo.use_kl_in_reward, the KL term is part of the reward,
    and the loss has no KL term. The loss of demonstrations is `compute_data_loss`.
    """
    algorithm, is_bypass = algorithms[algo.name], bypasses(algo)
    estimate = ESTIMATORS[algo.kl_estimator]
    has_kl_term = algo.kl_coef > 0 and not algo.use_kl_in_reward

    def loss(rows: LossInputs) -> tuple[torch.Tensor, LossMetrics]:
        if rows.is_demonstration:
            assert distill is not None, "demonstrations need a teacher"
            return compute_data_loss(rows, distill)
        correction_R = compute_is_weights(rows, algo)
        compared = replace(rows, old_logprob_R=rows.rollout_logprob_R) if is_bypass else rows
        loss_R = correction_R * algorithm.policy_loss(compared, algo)
        if has_kl_term:
            assert rows.ref_logprob_R is not None
            loss_R = loss_R + algo.kl_coef * estimate(rows.logprob_R, rows.ref_logprob_R)
        if algo.entropy_coef > 0:
            loss_R = loss_R - algo.entropy_coef * rows.entropy_R
        if distill is not None and not distill.is_for_responses:
            loss_R = loss_R + distill.coef * distill.divergence(rows)
        bounds = algorithm.clip_bounds(compared, algo)
        return (rows.weight_R * loss_R).sum(), policy_metrics(rows, correction_R, algo, loss_inputs=compared, bounds=bounds)

    return loss


def compute_data_loss(rows: LossInputs, distill: DistillTerm) -> tuple[torch.Tensor, LossMetrics]:
    """Return the loss of demonstrations among the rollouts of a step, and its metrics.

    The loss is the sum over the demonstrations' tokens of weight * distill_coef * divergence (GKD,
    arXiv 2306.13649), or of weight * distill_coef * negative log-likelihood if they are responses
    of the teacher (GTR-Turbo, arXiv 2512.13043).
    """
    divergence_R = distill.divergence(rows)
    name, count = RESPONSE_METRICS if distill.is_for_responses else DATA_METRICS
    sums = {name: divergence_R.detach().sum(), count: divergence_R.new_tensor(float(divergence_R.numel()))}
    return (rows.weight_R * distill.coef * divergence_R).sum(), LossMetrics(sums=sums, maxima={})


def make_sft_objective(*, distill: DistillTerm | None = None, teacher_alone: bool = False) -> Loss:
    """Return the loss function of supervised fine-tuning.

    The loss is the sum over the demonstrations' tokens of weight * (negative log-likelihood +
    distill_coef * divergence). With a teacher this is distillation on data, the off-policy part of
    GKD (arXiv 2306.13649, eq. 2); with `teacher_alone`, the first term is left out.
    """
    assert distill is not None or not teacher_alone

    def loss(rows: LossInputs) -> tuple[torch.Tensor, LossMetrics]:
        loss_R = torch.zeros_like(rows.logprob_R) if teacher_alone else -rows.logprob_R
        sums = {"policy/entropy": rows.entropy_R.detach().sum()}
        if distill is not None:
            divergence_R = distill.divergence(rows)
            loss_R = loss_R + distill.coef * divergence_R
            sums |= {"distill/divergence": divergence_R.detach().sum(), "sft/nll": -rows.logprob_R.detach().sum()}
            if rows.clipped_R is not None:
                sums["distill/clipped_fraction"] = rows.clipped_R.sum()
        return (rows.weight_R * loss_R).sum(), LossMetrics(sums=sums, maxima={})

    return loss


@torch.no_grad()
def policy_metrics(
    rows: LossInputs, correction_R: torch.Tensor, algo: AlgoSettings, *, loss_inputs: LossInputs, bounds: ClipBounds
) -> LossMetrics:
    """Return metrics of the policy change since sampling and of the engine-trainer mismatch.

    policy/clip_low_fraction is the fraction of tokens that have a negative advantage and are below
    the algorithm's lower bound. policy/clip_high_fraction is the fraction of tokens that have a
    positive advantage and are above the upper bound. policy/ppo_kl estimates KL(old || pi) by k3,
    since the tokens were sampled from the old policy. rollout_mismatch/logprob_abs_diff covers only
    tokens that were sampled with the weights at the start of the step.

    Args:
        rows: Loss inputs, with the trainer's old logprobs.
        correction_R: Importance-sampling weight of each token.
        algo: Settings of the algorithm.
        loss_inputs: Loss inputs that the policy loss used. Equal to `rows`, unless the rollout
            correction bypasses old logprobs; then old_logprob_R contains the engine's logprobs.
        bounds: Masks of the tokens below and above the algorithm's bounds.
    """
    ratio_R, advantage_R = log_ratio(loss_inputs).exp(), rows.advantage_R
    below_R, above_R = bounds
    gap_R = (rows.old_logprob_R - rows.rollout_logprob_R).abs()
    if rows.on_policy_R is not None:  # tokens sampled with older weights are expected to differ, so leave them out
        gap_R = gap_R.where(rows.on_policy_R, 0.0)
    counts = {
        "policy/clip_low_fraction": (advantage_R < 0) & below_R,
        "policy/clip_high_fraction": (advantage_R > 0) & above_R,
        "policy/dual_clip_fraction": (advantage_R < 0) & (ratio_R > algo.clip_ratio_c) & (algo.clip_ratio_c > 0),
    }
    sums = {
        "policy/ratio": ratio_R.sum(),
        **{name: chosen_R.to(ratio_R.dtype).sum() for name, chosen_R in counts.items()},
        "policy/ppo_kl": k3(loss_inputs.old_logprob_R, rows.logprob_R).sum(),
        "policy/entropy": rows.entropy_R.sum(),
        "rollout_mismatch/logprob_abs_diff": gap_R.sum(),
    }
    if rows.ref_logprob_R is not None:
        sums["policy/kl_ref"] = k3(rows.logprob_R, rows.ref_logprob_R).sum()
    if rows.teacher_logprob_R is not None:
        sums["distill/reverse_kl"] = (rows.logprob_R - rows.teacher_logprob_R).sum()
    if rows.divergence_R is not None:
        sums["distill/divergence"] = rows.divergence_R.sum()
    if rows.clipped_R is not None:
        sums["distill/clipped_fraction"] = rows.clipped_R.sum()
    if rows.on_policy_R is not None:
        sums["rollout/on_policy_fraction"] = rows.on_policy_R.to(gap_R.dtype).sum()
    if algo.rollout_correction != "none":
        sums |= correction_metrics(rows, correction_R, algo)
    elif rows.on_policy_R is not None:
        sums |= importance_metrics(rows)
    maxima = {"policy/ratio_abs_dev_max": _max((ratio_R - 1.0).abs()), "rollout_mismatch/logprob_abs_diff_max": _max(gap_R)}
    return LossMetrics(
        sums=sums, maxima=maxima, histograms={"rollout_mismatch/logprob_abs_diff": count_in_bins(gap_R, mask_R=rows.on_policy_R)}
    )


def _max(x_R: torch.Tensor) -> torch.Tensor:
    return x_R.max() if x_R.numel() else x_R.new_zeros(())
