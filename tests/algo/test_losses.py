"""Losses against hand numbers, a textbook loop over tokens in plain Python, and analytic gradients. KL: test_kl.py."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algo.losses import MAX_LOG_RATIO, LossMetrics, episode_weight, grpo_loss, policy_loss_T, sft_loss

CLIPS = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0}
SETTINGS = CLIPS | {"kl_coef": 0.1, "kl_estimator": "k3", "entropy_coef": 0.01}
Inputs = dict[str, torch.Tensor]


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random_inputs(seed: int, num_tokens: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(num_tokens, generator=generator, dtype=torch.float64)

    old_T = -normal(1.0).abs()
    return {
        "logprob_T": old_T + normal(0.7),
        "old_logprob_T": old_T,
        "reference_logprob_T": old_T + normal(0.5),
        "advantage_T": normal(1.0),
        "entropy_T": normal(1.0).abs(),
        "weight_T": normal(1.0).abs(),
        "mask_T": torch.rand(num_tokens, generator=generator) < 0.7,
    }


def loss_and_gradient(inputs: Inputs, options: dict[str, float | str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, LossMetrics]:
    """Loss, its gradients in logprob and entropy, metrics."""
    leaves = inputs | {name: inputs[name].clone().requires_grad_() for name in ("logprob_T", "entropy_T")}
    loss, metrics = grpo_loss(**leaves, **options)
    logprob_grad, entropy_grad = torch.autograd.grad(loss, (leaves["logprob_T"], leaves["entropy_T"]))
    return loss.detach(), logprob_grad, entropy_grad, metrics


# policy_loss_T ----------------------------------------------------------------------------------------------------------------------------

CASES = [  # ratio, advantage, loss = -max(min(r A, clip(r, 0.8, 1.3) A), 3 A if A < 0), dloss / dlogprob = -r A, or 0 where bounded
    (1.0, 2.0, -2.0, -2.0),  # on-policy: -A, gradient -A
    (1.2, 2.0, -2.4, -2.4),  # inside: -1.2 * 2
    (1.5, 2.0, -2.6, 0.0),  # above the upper bound: -1.3 * 2
    (0.5, 2.0, -1.0, -1.0),  # a positive advantage has no lower bound: -0.5 * 2
    (1.0, -2.0, 2.0, 2.0),
    (0.5, -2.0, 1.6, 0.0),  # below the lower bound: 0.8 * 2
    (2.0, -2.0, 4.0, 4.0),  # a negative advantage has no upper bound: 2 * 2 ...
    (5.0, -2.0, 6.0, 0.0),  # ... but the dual clip: 3 * 2
    (5.0, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient"), CASES)
def test_policy_loss_and_gradient_by_hand(ratio: float, advantage: float, loss: float, gradient: float):
    logprob_T = tensor(math.log(ratio) - 1.0).requires_grad_()
    loss_T = policy_loss_T(logprob_T, tensor(-1.0), tensor(advantage), **CLIPS)
    loss_T.sum().backward()
    assert loss_T.item() == pytest.approx(loss, abs=1e-14)
    assert logprob_T.grad.item() == pytest.approx(gradient, abs=1e-14)


def test_dual_clip_zero_is_off():
    # r = 5, A = -2: 5 * 2 = 10 instead of 6
    loss_T = policy_loss_T(tensor(math.log(5.0)), tensor(0.0), tensor(-2.0), clip_low=0.2, clip_high=0.3, dual_clip=0)
    assert loss_T.item() == pytest.approx(10.0)


def test_on_policy_gradient_is_reinforce_even_with_an_empty_clip_range():
    advantage_T = tensor(1.5, -0.5, 0.0)
    logprob_T = tensor(-0.3, -2.0, -9.0).requires_grad_()
    policy_loss_T(logprob_T, logprob_T.detach(), advantage_T, clip_low=0.0, clip_high=0.0, dual_clip=0).sum().backward()
    assert torch.equal(logprob_T.grad, -advantage_T)


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0, -math.inf])
def test_extreme_ratios_stay_finite_in_float32(log_ratio: float, advantage: float):
    logprob_T = torch.tensor([log_ratio]).requires_grad_()
    loss_T = policy_loss_T(logprob_T, torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.2, dual_clip=0)
    loss_T.sum().backward()
    ratio = math.exp(min(log_ratio, MAX_LOG_RATIO))
    expected = -min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
    assert loss_T.item() == pytest.approx(expected, rel=1e-6)
    assert logprob_T.grad.item() == 0.0  # bounded, ended by the cap, or multiplied by a ratio of 0


# grpo_loss --------------------------------------------------------------------------------------------------------------------------------


def textbook(inputs: Inputs, options: dict[str, float | str]) -> tuple[float, list[float], dict[str, float]]:
    """Token by token in plain floats: loss, dloss / dlogprob, metrics."""
    columns = {name: value.tolist() for name, value in inputs.items()}
    low, high, dual = 1 - options["clip_low"], 1 + options["clip_high"], options["dual_clip"]
    loss, gradient = 0.0, []
    metrics = dict.fromkeys(("ratio", "low", "high", "dual", "kl_old", "kl_reference", "entropy", "gap"), 0.0)
    for t, sampled in enumerate(columns["mask_T"]):
        if not sampled:
            gradient.append(0.0)
            continue
        log_ratio = columns["logprob_T"][t] - columns["old_logprob_T"][t]
        to_reference = columns["reference_logprob_T"][t] - columns["logprob_T"][t]
        r, a, weight, entropy = math.exp(log_ratio), columns["advantage_T"][t], columns["weight_T"][t], columns["entropy_T"][t]
        capped = {"high": a > 0 and r > high, "low": a < 0 and r < low, "dual": a < 0 and dual > 0 and r > dual}
        bound = high if capped["high"] else low if capped["low"] else dual if capped["dual"] else r
        kl, kl_gradient = {
            "k1": (-to_reference, 1.0),
            "k2": (to_reference**2 / 2, -to_reference),
            "k3": (math.exp(to_reference) - 1 - to_reference, 1 - math.exp(to_reference)),
        }[options["kl_estimator"]]
        loss += weight * (-bound * a + options["kl_coef"] * kl - options["entropy_coef"] * entropy)
        gradient.append(weight * ((0.0 if any(capped.values()) else -r * a) + options["kl_coef"] * kl_gradient))
        for name, value in capped.items():
            metrics[name] += value
        metrics["ratio"] += r
        metrics["kl_old"] += r - 1 - log_ratio
        metrics["kl_reference"] += math.exp(to_reference) - 1 - to_reference
        metrics["entropy"] += entropy
        metrics["gap"] = max(metrics["gap"], abs(r - 1))
    return loss, gradient, metrics


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 40), st.sampled_from(["k1", "k2", "k3"]), st.sampled_from([0.0, 1.5, 3.0]))
def test_grpo_loss_is_the_textbook_loop(seed: int, num_tokens: int, estimator: str, dual_clip: float):
    inputs, options = random_inputs(seed, num_tokens), SETTINGS | {"kl_estimator": estimator, "dual_clip": dual_clip}
    loss, gradient_T, entropy_gradient_T, metrics = loss_and_gradient(inputs, options)
    expected_loss, expected_gradient, expected = textbook(inputs, options)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-11, abs=1e-11)
    torch.testing.assert_close(gradient_T, tensor(*expected_gradient), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(entropy_gradient_T, -0.01 * inputs["weight_T"] * inputs["mask_T"], rtol=1e-11, atol=1e-11)
    assert {name: value.item() for name, value in metrics.sums.items()} == pytest.approx(
        {
            "policy/ratio": expected["ratio"],
            "policy/clip_low_fraction": expected["low"],
            "policy/clip_high_fraction": expected["high"],
            "policy/dual_clip_fraction": expected["dual"],
            "policy/kl_old": expected["kl_old"],
            "policy/kl_reference": expected["kl_reference"],
            "policy/entropy": expected["entropy"],
        },
        rel=1e-11,
        abs=1e-11,
    )
    assert metrics.maxima["policy/ratio_gap_max"].item() == pytest.approx(expected["gap"], rel=1e-11)


def test_grpo_loss_by_hand():
    """Two sampled tokens, r = 1 and A = 2 | r = 1.5 (clipped at 1.3) and A = 2, weights 1 and 0.5; one observed token between them."""
    loss, metrics = grpo_loss(
        tensor(-1.0, 0.0, math.log(1.5) - 2.0),
        old_logprob_T=tensor(-1.0, 0.0, -2.0),
        advantage_T=tensor(2.0, 0.0, 2.0),
        mask_T=torch.tensor([True, False, True]),
        weight_T=tensor(1.0, 0.0, 0.5),
        reference_logprob_T=tensor(-1.0 - math.log(2), 0.0, math.log(1.5) - 2.0),
        entropy_T=tensor(0.7, 5.0, 0.4),
        **SETTINGS,
    )
    # policy 1 * -2 + 0.5 * -2.6 = -3.3; k3 of the first token log 2 - 0.5, of the second 0; entropy 1 * 0.7 + 0.5 * 0.4 = 0.9
    assert loss.item() == pytest.approx(-3.3 + 0.1 * (math.log(2) - 0.5) - 0.01 * 0.9, abs=1e-14)
    assert metrics.sums["policy/ratio"].item() == pytest.approx(2.5)  # 1 + 1.5, over 2 tokens a mean of 1.25
    assert metrics.sums["policy/clip_high_fraction"].item() == 1.0
    assert metrics.sums["policy/clip_low_fraction"].item() == 0.0
    assert metrics.sums["policy/kl_old"].item() == pytest.approx(0.5 - math.log(1.5))
    assert metrics.sums["policy/kl_reference"].item() == pytest.approx(math.log(2) - 0.5)
    assert metrics.sums["policy/entropy"].item() == pytest.approx(1.1)
    assert metrics.maxima["policy/ratio_gap_max"].item() == pytest.approx(0.5)


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 24))
def test_two_halves_add_up_to_the_whole(seed: int, cut: int):
    inputs = random_inputs(seed, 24)
    whole = loss_and_gradient(inputs, SETTINGS)
    halves = [{name: x_T[part] for name, x_T in inputs.items()} for part in (slice(cut), slice(cut, None))]
    first, second = (loss_and_gradient(half, SETTINGS) for half in halves)
    torch.testing.assert_close(first[0] + second[0], whole[0], rtol=1e-12, atol=1e-12)
    assert torch.equal(torch.cat([first[1], second[1]]), whole[1])
    for name, value in whole[3].sums.items():
        torch.testing.assert_close(first[3].sums[name] + second[3].sums[name], value, rtol=1e-12, atol=1e-12)
    for name, value in whole[3].maxima.items():
        assert torch.equal(torch.maximum(first[3].maxima[name], second[3].maxima[name]), value)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_masked_garbage_reaches_neither_loss_nor_gradient_nor_metric(garbage: float, estimator: str):
    clean = random_inputs(5, 32)
    hidden_T = ~clean["mask_T"]
    dirty = {name: x_T if name == "mask_T" else x_T.masked_fill(hidden_T, garbage) for name, x_T in clean.items()}
    options = SETTINGS | {"kl_estimator": estimator}
    expected, actual = loss_and_gradient(clean, options), loss_and_gradient(dirty, options)
    assert hidden_T.any() and torch.isfinite(expected[0])
    for left, right in zip(actual[:3], expected[:3], strict=True):
        assert torch.equal(left, right)
    assert actual[3] == expected[3]
    assert torch.all(actual[1][hidden_T] == 0) and torch.all(actual[2][hidden_T] == 0)


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_a_micro_batch_without_sampled_tokens_is_zero_and_has_the_same_metrics(num_tokens: int):
    inputs = random_inputs(1, num_tokens) | {"mask_T": torch.zeros(num_tokens, dtype=torch.bool)}
    loss, gradient_T, _, metrics = loss_and_gradient(inputs, SETTINGS)
    usual = loss_and_gradient(random_inputs(1, 9), SETTINGS)[3]
    assert loss.item() == 0.0 and torch.equal(gradient_T, torch.zeros(num_tokens, dtype=torch.float64))
    assert {name: value.item() for name, value in metrics.sums.items()} == dict.fromkeys(usual.sums, 0.0)
    assert {name: value.item() for name, value in metrics.maxima.items()} == dict.fromkeys(usual.maxima, 0.0)


def test_without_reference_and_entropy_only_the_policy_term_is_left():
    inputs = random_inputs(3, 16)
    policy_T = policy_loss_T(inputs["logprob_T"], inputs["old_logprob_T"], inputs["advantage_T"], **CLIPS)
    off = CLIPS | {"kl_coef": 0.0, "kl_estimator": "k3", "entropy_coef": 0.0}
    measured, metrics = grpo_loss(**inputs, **off)
    bare, bare_metrics = grpo_loss(**(inputs | {"reference_logprob_T": None, "entropy_T": None}), **off)
    assert bare.item() == measured.item() == pytest.approx((policy_T * inputs["weight_T"])[inputs["mask_T"]].sum().item(), abs=1e-12)
    assert metrics.sums.keys() - bare_metrics.sums.keys() == {"policy/kl_reference", "policy/entropy"}


# sft_loss ---------------------------------------------------------------------------------------------------------------------------------


def test_sft_loss_by_hand_and_masked():
    # 1 * 0.5 + 2 * 0.25 = 1; the gradient is minus the weight
    logprob_T = tensor(-0.5, math.nan, -0.25, -math.inf).requires_grad_()
    loss = sft_loss(logprob_T, tensor(1.0, 0.0, 2.0, 0.0))
    loss.backward()
    assert loss.item() == 1.0
    assert logprob_T.grad.tolist() == [-1.0, 0.0, -2.0, 0.0]


# episode_weight ---------------------------------------------------------------------------------------------------------------------------


def test_episode_weight_by_hand():
    assert episode_weight(4, aggregation="token_mean", fixed_length=0) == (1.0, 4)
    assert episode_weight(4, aggregation="sequence_mean", fixed_length=0) == (0.25, 1)
    assert episode_weight(4, aggregation="fixed_length", fixed_length=100) == (1.0, 100)
    with pytest.raises(ValueError, match="aggregation=mean"):
        episode_weight(4, aggregation="mean", fixed_length=0)


def mean_of_all(episodes: list[torch.Tensor]) -> float:
    return torch.cat(episodes).mean().item()


def mean_of_means(episodes: list[torch.Tensor]) -> float:
    return sum(episode.mean().item() for episode in episodes) / len(episodes)


def dr_grpo(episodes: list[torch.Tensor]) -> float:
    return sum(episode.sum().item() for episode in episodes) / (len(episodes) * 12)


@pytest.mark.parametrize(
    ("aggregation", "fixed_length", "textbook_mean"),
    [("token_mean", 0, mean_of_all), ("sequence_mean", 0, mean_of_means), ("fixed_length", 12, dr_grpo)],
)
def test_weights_and_one_division_give_the_mean_of_the_paper(
    aggregation: str, fixed_length: int, textbook_mean: Callable[[list[torch.Tensor]], float]
):
    generator = torch.Generator().manual_seed(0)
    episodes = [torch.randn(length, generator=generator, dtype=torch.float64) for length in (1, 3, 12, 7)]
    shares = [episode_weight(len(episode), aggregation=aggregation, fixed_length=fixed_length) for episode in episodes]
    total = sum(weight * episode.sum().item() for (weight, _), episode in zip(shares, episodes, strict=True))
    assert total / sum(share for _, share in shares) == pytest.approx(textbook_mean(episodes), abs=1e-14)
