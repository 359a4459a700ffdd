"""KL estimators against values computed by hand, a Taylor series, and exact enumeration over a
categorical distribution."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algo.kl import ESTIMATORS, MAX_K3, MAX_LOG_RATIO, adaptive_kl_coef, k1, k2, k3
from tests.support.random_loss_inputs import make_tensor


def test_kl_by_hand() -> None:
    # Logprob log 0.5, reference log 0.25: d = -log 2; k1 = log 2, k2 = log(2)^2 / 2,
    # k3 = 0.5 - 1 + log 2.
    values = [estimate(make_tensor(math.log(0.5)), make_tensor(math.log(0.25))).item() for estimate in (k1, k2, k3)]
    assert values == pytest.approx([math.log(2), math.log(2) ** 2 / 2, math.log(2) - 0.5], abs=1e-15)
    assert dict(ESTIMATORS) == {"k1": k1, "k2": k2, "k3": k3}


def test_the_weight_goes_towards_its_target_by_hand() -> None:
    """The adaptive KL coefficient follows TRL's AdaptiveKLController (value *= 1 + clip(current /
    target - 1, -0.2, 0.2) * n_steps / horizon) and Ziegler's equation with K = n / horizon. The
    expected values are computed by hand from coefficient 0.5, target 0.1, and 250 of 1000 episodes
    per step."""
    steps = {  # KL -> next coefficient
        0.11: 0.5 * (1 + 0.1 / 4),  # a tenth above the target
        0.08: 0.5 * (1 - 0.2 / 4),  # a fifth below the target, exactly at the bound
        0.0: 0.5 * 0.95,  # beyond the bound
        9.0: 0.5 * 1.05,
        0.1: 0.5,
    }
    for kl, expected in steps.items():
        assert adaptive_kl_coef(0.5, kl, target=0.1, num_episodes=250, horizon=1000) == pytest.approx(expected, rel=1e-12), kl
    assert adaptive_kl_coef(0.5, 9.0, target=0.1, num_episodes=0, horizon=1000) == 0.5, "without episodes it stays"
    value = 0.2  # TRL's defaults: init_kl_coef 0.2, target 6, horizon 10000, batches of 256
    for kl in (7.0, 12.0, 3.0):
        value = adaptive_kl_coef(value, kl, target=6.0, num_episodes=256, horizon=10_000)
    assert value == pytest.approx(0.2 * 1.004266666666667 * 1.00512 * 0.99488, rel=1e-12)


@settings(deadline=None)
@given(st.floats(-50, 19), st.floats(-1, 1))
def test_k3_is_never_negative_is_bounded_and_keeps_its_digits_near_zero(far: float, near: float) -> None:
    """k3 is nonnegative up to rounding, is at most 10, and equals its Taylor series near zero,
    where a plain difference would lose all digits."""
    k3_far, k3_near = k3(torch.zeros(2, dtype=torch.float64), make_tensor(far, near * 1e-4)).tolist()
    assert k3_far == pytest.approx(min(math.expm1(far) - far, 10.0), rel=1e-12, abs=1e-15)
    assert k3_far >= 0.0 or abs(k3_far) <= math.ulp(far)
    # Taylor series: d^2 / 2 + d^3 / 6; the next term is below 1e-16 / 24 relative to 1.
    # A difference of numbers near 1 would have an error of 1e-16.
    d = near * 1e-4
    assert k3_near == pytest.approx(d**2 / 2 + d**3 / 6, abs=5e-18 + 2 * math.ulp(d))


def test_estimators_in_expectation_by_enumeration() -> None:
    """Expected values and gradients of the estimators, enumerated over all outcomes of a
    categorical distribution, equal the KL divergences in closed form. k2 is biased in value, k1 has
    no gradient, k2 has the gradient of the KL, and k3 that of the reverse KL."""
    logits_V = make_tensor(0.3, -1.2, 0.8, 0.0, 2.0).requires_grad_()
    reference_V = torch.log_softmax(make_tensor(-0.5, 0.4, 1.1, 0.2, -1.0), dim=0)
    logprob_V = torch.log_softmax(logits_V, dim=0)
    kl = (logprob_V.exp() * (logprob_V - reference_V)).sum()
    reverse_kl = (reference_V.exp() * (reference_V - logprob_V)).sum()
    (kl_grad_V,) = torch.autograd.grad(kl, logits_V, retain_graph=True)
    (reverse_grad_V,) = torch.autograd.grad(reverse_kl, logits_V, retain_graph=True)
    means, gradients = {}, {}
    for name, estimate in ESTIMATORS.items():
        mean = (logprob_V.detach().exp() * estimate(logprob_V, reference_V)).sum()  # outcomes are sampled, so the weights have no gradient
        means[name] = mean.item()
        (gradients[name],) = torch.autograd.grad(mean, logits_V, retain_graph=True)
    assert means["k1"] == pytest.approx(kl.item(), abs=1e-14)
    assert means["k3"] == pytest.approx(kl.item(), abs=1e-14)
    assert abs(means["k2"] - kl.item()) > 0.01  # biased
    torch.testing.assert_close(gradients["k1"], torch.zeros_like(kl_grad_V), rtol=0, atol=1e-14)
    torch.testing.assert_close(gradients["k2"], kl_grad_V, rtol=0, atol=1e-14)
    torch.testing.assert_close(gradients["k3"], reverse_grad_V, rtol=0, atol=1e-14)


@pytest.mark.known_failure("kl-overflow")
@pytest.mark.parametrize(
    ("difference", "value", "gradient"),
    [
        (2.5, math.exp(2.5) - 3.5, 1 - math.exp(2.5)),  # 8.68, below the bound
        (2.7, 10.0, 0.0),  # e^2.7 - 3.7 = 11.2
        (8.0, 10.0, 0.0),  # 3e3; its gradient would be as large
        (-10.5, math.exp(-10.5) + 9.5, 1 - math.exp(-10.5)),
        (-12.0, 10.0, 0.0),  # e^-12 + 11
    ],
)
def test_k3_ends_at_its_bound_and_so_does_its_gradient(difference: float, value: float, gradient: float) -> None:
    """k3 and its gradient equal values computed by hand below the bound of 10.

    At the bound the gradient is 0.
    """
    logprob_R = make_tensor(-13.0).requires_grad_()
    value_R = k3(logprob_R, make_tensor(-13.0 + difference))
    value_R.sum().backward()
    assert MAX_K3 == 10.0
    assert value_R.item() == pytest.approx(value, abs=1e-12)
    assert logprob_R.grad.item() == pytest.approx(gradient, abs=1e-12)


@pytest.mark.parametrize("difference", [MAX_LOG_RATIO + 1.0, 100.0, 1000.0, math.inf])
def test_k3_of_a_vanished_token_is_finite_in_float32(difference: float) -> None:
    """k3 is 10 and its gradient 0 where exp overflows float32, which it does at 88.

    A gradient of 0 * inf would be NaN.
    """
    logprob_R = torch.tensor([-difference]).requires_grad_()
    value_R = k3(logprob_R, torch.zeros(1))
    value_R.sum().backward()
    assert (value_R.item(), logprob_R.grad.item()) == (10.0, 0.0)


@pytest.mark.parametrize(("name", "gradient"), [("k1", 1.0), ("k2", 30.0)])
def test_k1_and_k2_have_no_bound(name: str, gradient: float) -> None:
    """k1 and k2 keep their gradient at a log ratio of 30."""
    logprob_R = make_tensor(30.0).requires_grad_()
    ESTIMATORS[name](logprob_R, make_tensor(0.0)).sum().backward()
    assert logprob_R.grad.item() == gradient
