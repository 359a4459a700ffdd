"""The critic's loss, one ratio per turn, and scaled thought logprobs, against values computed by
hand and textbook loops."""

import math
import random

import pytest
import torch

from megatron_rl.algo.algorithms import ALGORITHMS
from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.algo.policy_losses import ppo_turn_clip
from megatron_rl.algo.thoughts import scale_thought_logprobs
from megatron_rl.algo.value import clipped_squared_error, make_value_objective, shared_value_loss, warmup_value_loss
from megatron_rl.config import AlgoSettings, CriticSettings
from megatron_rl.types import LossInputs, ValueLossInputs
from tests.support.random_loss_inputs import make_loss_inputs, make_tensor
from tests.support.rollout_factory import make_rollout


def value_rows(value: list[float], old: list[float], target: list[float], *, weight: list[float], turns: list[int]) -> ValueLossInputs:
    return ValueLossInputs(
        value_R=make_tensor(*value).requires_grad_(), old_value_R=make_tensor(*old), return_R=make_tensor(*target),
        weight_R=make_tensor(*weight),
        turn_R=torch.tensor(turns),
    )  # fmt: skip


def test_the_squared_error_and_its_clipped_form() -> None:
    """The clipped value loss is the larger of the clipped and the unclipped squared error.

    With old value 0 and bound 0.25: V = 1 and target 3 give 2 unclipped and (0.25 - 3)^2 / 2
    clipped, which is larger; V = 1 and target 0 give 0.5 unclipped, which is larger.
    """
    rows = value_rows([1.0, 1.0], [0.0, 0.0], [3.0, 0.0], weight=[1.0, 1.0], turns=[0, 0])
    assert clipped_squared_error(rows, 0.0).tolist() == [2.0, 0.5]
    assert clipped_squared_error(rows, 0.25).tolist() == [2.75**2 / 2, 0.5]
    (gradient,) = torch.autograd.grad(clipped_squared_error(rows, 0.25).sum(), rows.value_R)
    assert gradient.tolist() == [0.0, 1.0], "where the bound holds the value learns nothing more"


def test_a_token_counts_its_weight_and_a_turn_that_of_its_tokens() -> None:
    """The value loss weights each token, or each turn by the total weight of its tokens.

    Turns have 2 and 1 tokens, errors 0.5, 2, 4.5 and weights 1, 2, 3. At turn level the second
    token is no action: 3 * 0.5 + 3 * 4.5.
    """
    rows = value_rows([1.0, 2.0, 3.0], [0.0] * 3, [0.0] * 3, weight=[1.0, 2.0, 3.0], turns=[0, 0, 1])
    for over, expected in (("tokens", 0.5 + 4.0 + 13.5), ("turns", 1.5 + 13.5)):
        loss, metrics = make_value_objective(CriticSettings(), level=over)(rows)
        assert loss.item() == pytest.approx(expected)
        assert metrics.losses["value/loss"].item() == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(make_value_objective(CriticSettings(), level="turns")(rows)[0], rows.value_R)
    assert gradient.tolist() == [3.0, 0.0, 9.0]


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_the_value_loss_is_the_textbooks_loop(clip: float) -> None:
    """The value loss equals the loop of verl and TRL: 0.5 * max((V - R)^2, (clip(V, V_old - c,
    V_old + c) - R)^2), averaged over tokens."""
    draw = random.Random(0)
    values, old, targets = ([draw.gauss(0, 1) for _ in range(50)] for _ in range(3))
    expected = 0.0
    for value, before, target in zip(values, old, targets, strict=True):
        kept = min(max(value, before - clip), before + clip) if clip else value
        expected += 0.5 * max((value - target) ** 2, (kept - target) ** 2) / 50
    rows = value_rows(values, old, targets, weight=[1 / 50] * 50, turns=[0] * 50)
    assert make_value_objective(CriticSettings(cliprange_value=clip), level="tokens")(rows)[0].item() == pytest.approx(expected, abs=1e-12)


def shared_rows() -> LossInputs:
    rows = make_loss_inputs([0.1, -0.3], [1.0, -2.0])
    values = value_rows([1.0, 2.0], [0.0, 0.0], [0.0, 0.0], weight=[1.0, 1.0], turns=[0, 1])
    return LossInputs(**{name: getattr(rows, name) for name in LossInputs.__dataclass_fields__ if name != "values"}, values=values)


def test_one_sum_of_both_losses() -> None:
    """A shared backbone adds the value loss, times its coefficient, to the policy loss.

    During warm-up only the value loss has a gradient. Metrics of both are kept.
    """
    rows, algo = shared_rows(), AlgoSettings(name="ppo")
    policy, value = make_policy_objective(algo), make_value_objective(CriticSettings(), level="tokens")
    alone, of_values = policy(rows)[0].item(), value(rows.values)[0].item()
    loss, metrics = shared_value_loss(policy, value, 0.25)(rows)
    assert loss.item() == pytest.approx(alone + 0.25 * of_values) and metrics.losses["value/loss"].item() == of_values == 2.5
    assert metrics.sums.keys() == policy(rows)[1].sums.keys()
    warm, measured = warmup_value_loss(policy, value)(rows)
    assert warm.item() == of_values and measured.sums.keys() == metrics.sums.keys()
    of_value, of_policy = torch.autograd.grad(warm, (rows.values.value_R, rows.logprob_R), allow_unused=True)
    assert of_value.tolist() == [1.0, 2.0] and of_policy is None


def test_ppo_is_the_textbooks_loop() -> None:
    """PPO's loss is the mean over tokens of -min(r A, clip(r, 0.8, 1.3) A), as in verl and TRL."""
    draw = random.Random(1)
    moved, advantages = [draw.gauss(0, 0.5) for _ in range(40)], [draw.gauss(0, 1) for _ in range(40)]
    expected = sum(
        -min(math.exp(m) * a, min(max(math.exp(m), 0.8), 1.3) * a) / 40 for m, a in zip(moved, advantages, strict=True)
    )  # fmt: skip
    rows = make_loss_inputs(moved, advantages, weight=[1 / 40] * 40)
    assert make_policy_objective(AlgoSettings(name="ppo", clip_ratio_low=0.2, clip_ratio_high=0.3))(rows)[0].item() == pytest.approx(
        expected, abs=1e-12
    )


def test_one_ratio_for_a_turn() -> None:
    """All tokens of a turn share one ratio and one loss.

    Turn 0 has the log ratios 0.1 and -0.3, so its ratio is exp(-0.2); turn 1 has 0.5, clipped at
    1.2.
    """
    rows = make_loss_inputs([0.1, -0.3, 0.5], [2.0, 2.0, 1.0], turns=[0, 0, 1])
    loss_R = ppo_turn_clip(rows, AlgoSettings(name="ppo_turn"))
    assert loss_R.tolist() == pytest.approx([-2 * math.exp(-0.2)] * 2 + [-1.2])
    # With turn_mean's weights (1/2 per token), each token of turn 0 has the gradient of one ratio:
    # -A s.
    (gradient,) = torch.autograd.grad((make_tensor(0.5, 0.5, 1.0) * loss_R).sum(), rows.logprob_R)
    assert gradient.tolist() == pytest.approx([-2 * math.exp(-0.2)] * 2 + [0.0])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_coefficients_scale_what_every_surrogate_compares(name: str) -> None:
    """Loss and gradient equal those of rows whose logprobs are already scaled by the coefficients.

    At ratio 1 the gradient is -A * coefficient.
    """
    algo = AlgoSettings(name=name)
    coefficients = [0.5, 0.5, 1.0, 0.0]

    def loss_and_gradient(moved: list[float]) -> tuple[float, list[float]]:
        rows = make_loss_inputs(moved, [1.0] * 4, segments=[0, 0, 0, 0], logprob_scale=coefficients)
        loss_R = ALGORITHMS[name].policy_loss(rows, algo)
        return loss_R.sum().item(), torch.autograd.grad(loss_R.sum(), rows.logprob_R)[0].tolist()

    _, gradient = loss_and_gradient([0.0] * 4)
    times = 4 if name == "ppo_turn" else 1  # each of the turn's four tokens has the turn's loss
    assert gradient == pytest.approx([-times * coefficient for coefficient in coefficients])
    if name in ("cispo", "dppo"):  # cispo and dppo scale the logprob only, not the compared probabilities
        return
    moved = [0.05, -0.02, 0.03, 0.4]
    whole = make_loss_inputs([c * m for c, m in zip(coefficients, moved, strict=True)], [1.0] * 4, segments=[0] * 4)
    assert loss_and_gradient(moved)[0] == pytest.approx(ALGORITHMS[name].policy_loss(whole, algo).sum().item(), abs=1e-12)


def test_thoughts_are_what_lies_before_the_action() -> None:
    """Sampled tokens before the action are thoughts and are scaled.

    The turns have 3, 2 and 2 tokens, each after an observed token: an action from the second token
    on, no action, and an action from the first token on.
    """
    rollout = make_rollout(0, reward=1.0, lengths=[3, 2, 2], turn_sequences=[0, 0, 1])
    first, second, third = rollout.turns
    first.action_start, third.action_start = first.token_span[0] + 1, third.token_span[0]
    scale_thought_logprobs([rollout], 0.25)
    assert rollout.sequences[0].logprob_scale == [0.0, 0.25, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert rollout.sequences[1].logprob_scale == [0.0, 1.0, 1.0, 0.0]
    assert second.action_start is None
