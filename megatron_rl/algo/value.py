"""Value loss of the critic.

The loss is a sum over actions; the trainer divides this sum by one global integer.
"""

import torch

from megatron_rl.algo.policy_losses import sum_by_id
from megatron_rl.config import CriticSettings
from megatron_rl.types import Loss, LossInputs, LossMetrics, ValueLoss, ValueLossInputs


def make_value_objective(critic: CriticSettings, *, level: str) -> ValueLoss:
    """Return the value loss function: the sum over actions of weight * squared error.

    If an action is a token, the weight of the action is the loss weight of the token. If an action
    is a turn (algo.gae_level=turns), the weight is the sum of the loss weights of the turn's
    tokens.
    """

    def loss(rows: ValueLossInputs) -> tuple[torch.Tensor, LossMetrics]:
        weight_R = rows.weight_R if level == "tokens" else turn_weight(rows)
        value = (weight_R * clipped_squared_error(rows, critic.cliprange_value)).sum()
        return value, LossMetrics(sums={}, maxima={}, losses={"value/loss": value.detach()})

    return loss


def clipped_squared_error(rows: ValueLossInputs, clip: float) -> torch.Tensor:
    """Return max((V - R)^2, (V' - R)^2) / 2, where V is the value and R is the return.

    V' is V clipped to [old value - clip, old value + clip]. A `clip` of 0 disables clipping.
    Sources: ppo2/model.py in github.com/openai/baselines, and value_loss in verl.
    """
    error_R = (rows.value_R - rows.return_R).square()
    if clip > 0:
        kept_R = rows.old_value_R + (rows.value_R - rows.old_value_R).clamp(-clip, clip)
        error_R = torch.maximum(error_R, (kept_R - rows.return_R).square())
    return error_R / 2


def turn_weight(rows: ValueLossInputs) -> torch.Tensor:
    """Return the summed weights of a turn at the turn's first row, and 0 at its other rows."""
    is_first_R = rows.turn_R.diff(prepend=rows.turn_R.new_full((1,), -1)) != 0
    return sum_by_id(rows.weight_R, rows.turn_R) * is_first_R


def shared_value_loss(policy: Loss, value: ValueLoss, coef: float) -> Loss:
    """Return the loss function policy + coef * value, for a critic that shares the backbone."""

    def loss(rows: LossInputs) -> tuple[torch.Tensor, LossMetrics]:
        assert rows.values is not None
        total, metrics = policy(rows)
        more, of_values = value(rows.values)
        metrics.losses.update(of_values.losses)
        return total + coef * more, metrics

    return loss


def warmup_value_loss(policy: Loss, value: ValueLoss) -> Loss:
    """Return the loss function that warms up a value head on a shared backbone.

    The loss is the value loss alone; the policy loss is computed only for its metrics.
    """

    def loss(rows: LossInputs) -> tuple[torch.Tensor, LossMetrics]:
        assert rows.values is not None
        _, metrics = policy(rows)
        total, of_values = value(rows.values)
        metrics.losses.update(of_values.losses)
        return total, metrics

    return loss
