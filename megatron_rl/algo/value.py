"""Value loss of the critic. Losses are sums, as in objective.py."""

import torch

from megatron_rl.algo.policy_losses import sum_by_id
from megatron_rl.config import CriticSettings
from megatron_rl.types import Loss, LossInputs, LossMetrics, ValueLoss, ValueLossInputs


def make_value_objective(critic: CriticSettings, *, level: str) -> ValueLoss:
    """Return the value objective: the sum of weight * error over actions.

    The weight of an action is its token's weight, or with algo.gae_level=turns the sum over the
    turn's tokens.
    """

    def loss(rows: ValueLossInputs) -> tuple[torch.Tensor, LossMetrics]:
        weight_R = rows.weight_R if level == "tokens" else turn_weight(rows)
        value = (weight_R * clipped_squared_error(rows, critic.cliprange_value)).sum()
        return value, LossMetrics(sums={}, maxima={}, losses={"value/loss": value.detach()})

    return loss


def clipped_squared_error(rows: ValueLossInputs, clip: float) -> torch.Tensor:
    """Return max((V - R)^2, (V' - R)^2) / 2.

    V' is the value clipped to within `clip` of the old value; `clip` 0 disables the clipping.
    Source: PPO's reference code (github.com/openai/baselines, ppo2/model.py); verl's value_loss.
    """
    error_R = (rows.value_R - rows.return_R).square()
    if clip > 0:
        kept_R = rows.old_value_R + (rows.value_R - rows.old_value_R).clamp(-clip, clip)
        error_R = torch.maximum(error_R, (kept_R - rows.return_R).square())
    return error_R / 2


def turn_weight(rows: ValueLossInputs) -> torch.Tensor:
    """Return the sum of a turn's weights at the turn's first row and 0 at its other rows."""
    is_first_R = rows.turn_R.diff(prepend=rows.turn_R.new_full((1,), -1)) != 0
    return sum_by_id(rows.weight_R, rows.turn_R) * is_first_R


def shared_value_loss(policy: Loss, value: ValueLoss, coef: float) -> Loss:
    """Return the loss policy + coef * value, for a critic that shares the policy's backbone."""

    def loss(rows: LossInputs) -> tuple[torch.Tensor, LossMetrics]:
        total, metrics = policy(rows)
        more, of_values = value(rows.values)
        metrics.losses.update(of_values.losses)
        return total + coef * more, metrics

    return loss


def warmup_value_loss(policy: Loss, value: ValueLoss) -> Loss:
    """Return the value loss for the warm-up of a value head on a shared backbone.

    The policy loss is computed for its metrics only.
    """

    def loss(rows: LossInputs) -> tuple[torch.Tensor, LossMetrics]:
        _, metrics = policy(rows)
        total, of_values = value(rows.values)
        metrics.losses.update(of_values.losses)
        return total, metrics

    return loss
