"""The critic's loss. Sums only, as in objective.py."""

import torch

from megatron_rl.algo.policy_losses import sum_by_id
from megatron_rl.config import CriticSettings
from megatron_rl.types import Loss, LossInputs, LossMetrics, ValueLoss, ValueLossInputs


def make_value_objective(critic: CriticSettings, *, level: str) -> ValueLoss:
    """Sum of weight * error over the actions: a token counts its weight, a turn (algo.gae_level=turns) that of its tokens together."""

    def loss(rows: ValueLossInputs) -> tuple[torch.Tensor, LossMetrics]:
        weight_R = rows.weight_R if level == "tokens" else turn_weight(rows)
        value = (weight_R * clipped_squared_error(rows, critic.cliprange_value)).sum()
        return value, LossMetrics(sums={}, maxima={}, losses={"value/loss": value.detach()})

    return loss


def clipped_squared_error(rows: ValueLossInputs, clip: float) -> torch.Tensor:
    """max((V - R)^2, (V' - R)^2) / 2 with V' = V kept within `clip` of the value before the step, 0 for no limit (PPO's reference code,
    github.com/openai/baselines, ppo2/model.py; verl's value_loss)."""
    error_R = (rows.value_R - rows.return_R).square()
    if clip > 0:
        kept_R = rows.old_value_R + (rows.value_R - rows.old_value_R).clamp(-clip, clip)
        error_R = torch.maximum(error_R, (kept_R - rows.return_R).square())
    return error_R / 2


def turn_weight(rows: ValueLossInputs) -> torch.Tensor:
    """On the first row of each turn the weight of its rows together, 0 on the others."""
    is_first_R = rows.turn_R.diff(prepend=rows.turn_R.new_full((1,), -1)) != 0
    return sum_by_id(rows.weight_R, rows.turn_R) * is_first_R


def shared_value_loss(policy: Loss, value: ValueLoss, coef: float) -> Loss:
    """Policy and value loss of one trunk as one sum."""

    def loss(rows: LossInputs) -> tuple[torch.Tensor, LossMetrics]:
        total, metrics = policy(rows)
        more, of_values = value(rows.values)
        metrics.losses.update(of_values.losses)
        return total + coef * more, metrics

    return loss


def warmup_value_loss(policy: Loss, value: ValueLoss) -> Loss:
    """What the warm-up of a head on a shared trunk minimizes; the policy is only measured."""

    def loss(rows: LossInputs) -> tuple[torch.Tensor, LossMetrics]:
        _, metrics = policy(rows)
        total, of_values = value(rows.values)
        metrics.losses.update(of_values.losses)
        return total, metrics

    return loss
