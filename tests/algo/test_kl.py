"""KL estimators against hand numbers, a Taylor series, and exact enumeration over a categorical."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algo.losses import MAX_LOG_RATIO, kl_T


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_kl_by_hand():
    # logprob log 0.5, reference log 0.25: d = -log 2; k1 = log 2, k2 = log(2)^2 / 2, k3 = 0.5 - 1 + log 2
    values = [kl_T(tensor(math.log(0.5)), tensor(math.log(0.25)), estimator=name).item() for name in ("k1", "k2", "k3")]
    assert values == pytest.approx([math.log(2), math.log(2) ** 2 / 2, math.log(2) - 0.5], abs=1e-15)
    with pytest.raises(ValueError, match="kl_estimator=k4"):
        kl_T(tensor(0.0), tensor(0.0), estimator="k4")


@settings(deadline=None)
@given(st.floats(-50, 19), st.floats(-1, 1))
def test_k3_is_never_negative_and_keeps_its_digits_near_zero(far: float, near: float):
    difference_T = tensor(far, near * 1e-4)
    k3_far, k3_near = kl_T(torch.zeros(2, dtype=torch.float64), difference_T, estimator="k3").tolist()
    assert k3_far >= 0.0 or abs(k3_far) <= math.ulp(far)
    # Taylor: d^2 / 2 + d^3 / 6, the next term is below 1e-16 / 24 relative to 1; a difference of numbers near 1 would be off by 1e-16
    d = near * 1e-4
    assert k3_near == pytest.approx(d**2 / 2 + d**3 / 6, abs=5e-18 + 2 * math.ulp(d))


def test_estimators_in_expectation_by_enumeration():
    """Over all outcomes of a categorical: means of the values, and of the gradients, against the KL divergences in closed form."""
    logits_V = tensor(0.3, -1.2, 0.8, 0.0, 2.0).requires_grad_()
    reference_V = torch.log_softmax(tensor(-0.5, 0.4, 1.1, 0.2, -1.0), dim=0)
    logprob_V = torch.log_softmax(logits_V, dim=0)
    kl = (logprob_V.exp() * (logprob_V - reference_V)).sum()
    reverse_kl = (reference_V.exp() * (reference_V - logprob_V)).sum()
    (kl_grad_V,) = torch.autograd.grad(kl, logits_V, retain_graph=True)
    (reverse_grad_V,) = torch.autograd.grad(reverse_kl, logits_V, retain_graph=True)
    means, gradients = {}, {}
    for name in ("k1", "k2", "k3"):
        mean = (logprob_V.detach().exp() * kl_T(logprob_V, reference_V, estimator=name)).sum()  # drawn, so no gradient through the weights
        means[name] = mean.item()
        (gradients[name],) = torch.autograd.grad(mean, logits_V, retain_graph=True)
    assert means["k1"] == pytest.approx(kl.item(), abs=1e-14)
    assert means["k3"] == pytest.approx(kl.item(), abs=1e-14)
    assert abs(means["k2"] - kl.item()) > 0.01  # biased
    torch.testing.assert_close(gradients["k1"], torch.zeros_like(kl_grad_V), rtol=0, atol=1e-14)
    torch.testing.assert_close(gradients["k2"], kl_grad_V, rtol=0, atol=1e-14)
    torch.testing.assert_close(gradients["k3"], reverse_grad_V, rtol=0, atol=1e-14)


def test_k3_of_a_vanished_token_is_finite_in_float32():
    logprob_T = torch.tensor([-1000.0]).requires_grad_()
    value_T = kl_T(logprob_T, torch.zeros(1), estimator="k3")
    value_T.sum().backward()
    assert value_T.item() == pytest.approx(math.exp(MAX_LOG_RATIO) - 1 - MAX_LOG_RATIO, rel=1e-6)
    assert logprob_T.grad.item() == 0.0
