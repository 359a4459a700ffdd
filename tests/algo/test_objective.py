"""The policy objective and its metrics, against values computed by hand and a token-by-token
textbook loop in plain floats.

Over 300 lines: a table lists which algorithms each setting affects.
"""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algo.algorithms import ALGORITHMS, check_algorithm
from megatron_rl.algo.distill import DistillTerm, read_divergence
from megatron_rl.algo.objective import make_policy_objective, make_sft_objective
from megatron_rl.algo.rollout_correction import CORRECTIONS
from megatron_rl.algo.thoughts import scale_thought_logprobs
from megatron_rl.batching import packing
from megatron_rl.config import AlgoSettings
from megatron_rl.io.histogram import count_in_bins
from megatron_rl.observe.step_metrics import merge_update_metrics
from megatron_rl.types import LossInputs, LossMetrics, TokenSequence
from tests.support.packed_example import make_pack_item
from tests.support.random_loss_inputs import make_loss_inputs, make_random_loss_inputs, make_tensor, to_floats
from tests.support.rollout_factory import make_rollout, set_kl_logprobs, set_states

ALGO = AlgoSettings(clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=3.0, kl_coef=0.1, entropy_coef=0.01)


def loss_and_gradient(rows: LossInputs, algo: AlgoSettings) -> tuple[float, torch.Tensor, torch.Tensor, LossMetrics]:
    """Return the loss, its gradients in logprob and entropy, and the metrics."""
    loss, metrics = make_policy_objective(algo)(rows)
    gradients = torch.autograd.grad(loss, (rows.logprob_R, rows.entropy_R), allow_unused=True)
    return loss.item(), *(torch.zeros_like(rows.old_logprob_R) if each is None else each for each in gradients), metrics


def numbers(metrics: LossMetrics) -> dict[str, float]:
    return {name: value.item() for name, value in (metrics.sums | metrics.maxima).items()}


def test_a_loss_by_hand() -> None:
    """Loss, gradients and metrics of two tokens equal values computed by hand.

    The tokens have r = 1 and r = 1.5 (clipped at 1.3), A = 2, and weights 1 and 0.5; the engine's
    logprobs differ by 0.25 and 0.5.
    """
    rows = make_loss_inputs(
        [0.0, math.log(1.5)], [2.0, 2.0], weight=[1.0, 0.5], entropy=[0.7, 0.4], rollout_logprob=[-1.25, -1.5],
        ref_logprob=[-1.0 - math.log(2), math.log(1.5) - 2.0],
    )  # fmt: skip
    loss, gradient_R, entropy_gradient_R, metrics = loss_and_gradient(rows, ALGO)
    # Policy loss: 1 * -2 + 0.5 * -2.6 = -3.3. k3 of the tokens: log 2 - 0.5 and 0.
    # Entropy: 1 * 0.7 + 0.5 * 0.4 = 0.9.
    assert loss == pytest.approx(-3.3 + 0.1 * (math.log(2) - 0.5) - 0.01 * 0.9, abs=1e-14)
    assert gradient_R.tolist() == pytest.approx([-2.0 + 0.1 * 0.5, 0.0], abs=1e-14)  # gradient of k3: 1 - exp(-log 2)
    assert entropy_gradient_R.tolist() == pytest.approx([-0.01, -0.005], abs=1e-16)
    assert numbers(metrics) == pytest.approx(
        {
            "policy/ratio": 2.5,  # 1 + 1.5, over 2 tokens a mean of 1.25
            "policy/clip_low_fraction": 0.0,
            "policy/clip_high_fraction": 1.0,
            "policy/dual_clip_fraction": 0.0,
            "policy/ppo_kl": 0.5 - math.log(1.5),
            "policy/kl_ref": math.log(2) - 0.5,
            "policy/entropy": 1.1,
            "rollout_mismatch/logprob_abs_diff": 0.75,
            "policy/ratio_abs_dev_max": 0.5,
            "rollout_mismatch/logprob_abs_diff_max": 0.5,
        },
        abs=1e-14,
    )


def test_the_gap_is_of_tokens_that_the_steps_own_weights_sampled() -> None:
    """Logprob differences count only tokens sampled with the step's own weights.

    Old logprobs are -1, -2, -3, -4; the engine's differ by 0.1, 3, 0.2 and 0.5, where the second
    and the last are stale tokens. The mean is over all tokens until the step's updates are merged;
    quantile and maximum are over the two on-policy tokens.
    """
    rows = make_loss_inputs([0.0] * 4, [1.0] * 4, rollout_logprob=[-1.1, -5.0, -3.2, -4.5])
    metrics = make_policy_objective(AlgoSettings())(dataclasses.replace(rows, on_policy_R=torch.tensor([True, False, True, False])))[1]
    told = {**metrics.sums, **metrics.maxima}
    assert told["rollout_mismatch/logprob_abs_diff"].item() == pytest.approx(0.3) and told[
        "rollout_mismatch/logprob_abs_diff_max"
    ].item() == pytest.approx(0.2)
    assert told["rollout/on_policy_fraction"].item() == 2.0 and metrics.histograms["rollout_mismatch/logprob_abs_diff"].sum().item() == 2
    assert torch.equal(
        metrics.histograms["rollout_mismatch/logprob_abs_diff"], count_in_bins(torch.tensor([0.1, 0.2], dtype=torch.float64))
    )
    largest = {"rollout_mismatch/logprob_abs_diff_max": 0.2, "rollout_mismatch/logprob_abs_diff_p99": 0.21}
    means = {name: value.item() / 4 for name, value in metrics.sums.items()} | largest
    merged = merge_update_metrics([means, means | {"rollout_mismatch/logprob_abs_diff": 7.0}])
    assert merged["rollout_mismatch/logprob_abs_diff"] == pytest.approx(0.15) and merged["rollout/on_policy_fraction"] == 0.5
    assert merged["rollout_mismatch/logprob_abs_diff_max"] == 0.2 and merged["rollout_mismatch/logprob_abs_diff_p99"] == 0.21
    none = merge_update_metrics([means | {"rollout_mismatch/logprob_abs_diff": 0.0, "rollout/on_policy_fraction": 0.0}])
    assert none["rollout_mismatch/logprob_abs_diff"] == 0.0


@pytest.mark.parametrize("correction", ["none", "token_tis"])
def test_how_much_stale_tokens_are_worth_is_told_without_a_correction(correction: str) -> None:
    """The effective sample size is reported for stale tokens even without a correction.

    With r = 1, 1, 1 and 3 it is 36 / (4 * 12); token_tis caps the last weight at 2, which gives 25
    / (4 * 7). If all tokens are on-policy it is not reported.
    """
    rows = make_loss_inputs([0.0] * 4, [1.0] * 4, rollout_logprob=[-1.0, -2.0, -3.0, -4.0 - math.log(3)])
    stale, algo = (
        dataclasses.replace(rows, on_policy_R=torch.tensor([True, True, True, False])),
        AlgoSettings(rollout_correction=correction),
    )
    means = {name: value.item() / 4 for name, value in make_policy_objective(algo)(stale)[1].sums.items()}
    merged = merge_update_metrics([means])
    assert merged["rollout_mismatch/is_eff_sample_size"] == pytest.approx({"none": 36 / 48, "token_tis": 25 / 28}[correction])
    assert not [name for name in merged if "importance" in name or "squared" in name]
    if correction == "none":
        assert not [name for name in make_policy_objective(algo)(rows)[1].sums if "importance" in name]


METRICS = (
    "policy/ratio", "policy/clip_low_fraction", "policy/clip_high_fraction", "policy/dual_clip_fraction", "policy/ppo_kl", "policy/entropy",
    "rollout_mismatch/logprob_abs_diff", "policy/kl_ref", "policy/ratio_abs_dev_max", "rollout_mismatch/logprob_abs_diff_max",
)  # fmt: skip
CORRECTED = (
    "rollout_mismatch/is_weight",
    "rollout_mismatch/is_weight_squared",
    "rollout_mismatch/is_truncated_fraction",
    "rollout_mismatch/masked_fraction",
)


def textbook(rows: LossInputs, algo: AlgoSettings) -> tuple[float, list[float], dict[str, float]]:
    """Compute PPO with all optional terms in plain floats, token by token.

    Returns the loss, dloss / dlogprob and the metrics.
    """
    columns = to_floats(rows)
    low, high, dual = 1 - algo.clip_ratio_low, 1 + algo.clip_ratio_high, algo.clip_ratio_c
    loss, gradient = 0.0, []
    metrics = dict.fromkeys(METRICS if algo.rollout_correction == "none" else METRICS + CORRECTED, 0.0)
    for t, old in enumerate(columns["old_logprob"]):
        log_ratio, to_reference = columns["logprob"][t] - old, columns["ref_logprob"][t] - columns["logprob"][t]
        r, a, weight, entropy = math.exp(log_ratio), columns["advantage"][t], columns["weight"][t], columns["entropy"][t]
        capped = {"clip_high": a > 0 and r > high, "clip_low": a < 0 and r < low, "dual_clip": a < 0 and dual > 0 and r > dual}
        bound = high if capped["clip_high"] else low if capped["clip_low"] else dual if capped["dual_clip"] else r
        correction = (
            min(math.exp(old - columns["rollout_logprob"][t]), algo.is_weight_cap) if algo.rollout_correction == "token_tis" else 1.0
        )
        is_large = math.exp(to_reference) - 1 - to_reference > 10
        kl, kl_gradient = {
            "k1": (-to_reference, 1.0),
            "k2": (to_reference**2 / 2, -to_reference),
            "k3": (10.0, 0.0) if is_large else (math.exp(to_reference) - 1 - to_reference, 1 - math.exp(to_reference)),
        }[algo.kl_estimator]
        in_loss = 0.0 if algo.use_kl_in_reward else algo.kl_coef
        loss += weight * (-correction * bound * a + in_loss * kl - algo.entropy_coef * entropy)
        gradient.append(weight * ((0.0 if any(capped.values()) else -correction * r * a) + in_loss * kl_gradient))
        for name, value in capped.items():
            metrics[f"policy/{name}_fraction"] += value
        metrics["policy/ratio"] += r
        metrics["policy/ppo_kl"] += min(r - 1 - log_ratio, 10)
        metrics["policy/kl_ref"] += min(math.exp(to_reference) - 1 - to_reference, 10)
        metrics["policy/entropy"] += entropy
        metrics["policy/ratio_abs_dev_max"] = max(metrics["policy/ratio_abs_dev_max"], abs(r - 1))
        metrics["rollout_mismatch/logprob_abs_diff"] += abs(old - columns["rollout_logprob"][t])
        metrics["rollout_mismatch/logprob_abs_diff_max"] = max(
            metrics["rollout_mismatch/logprob_abs_diff_max"], abs(old - columns["rollout_logprob"][t])
        )
        if algo.rollout_correction != "none":
            told = (correction, correction**2, correction == algo.is_weight_cap, 0.0)
            metrics |= {name: metrics[name] + value for name, value in zip(CORRECTED, told, strict=True)}
    return loss, gradient, metrics


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("correction", ["none", "token_tis"])
@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 2**31), st.lists(st.integers(1, 12), max_size=4), st.sampled_from([0.0, 1.5, 3.0]), st.booleans(),
    st.sampled_from([0.7, 3.0]),
)  # fmt: skip
def test_the_loss_is_the_textbook_loop(
    estimator: str, correction: str, seed: int, lengths: list[int], dual_clip: float, in_reward: bool, spread: float
) -> None:
    """Loss, gradients and metrics equal the textbook loop on random tokens."""
    algo = dataclasses.replace(
        ALGO, kl_estimator=estimator, clip_ratio_c=dual_clip, rollout_correction=correction, is_weight_cap=1.3, use_kl_in_reward=in_reward
    )
    rows = make_random_loss_inputs(seed, lengths, log_ratio_std=spread)
    loss, gradient_R, entropy_gradient_R, metrics = loss_and_gradient(rows, algo)
    expected_loss, expected_gradient, expected = textbook(rows, algo)
    assert loss == pytest.approx(expected_loss, rel=1e-11, abs=1e-11)
    torch.testing.assert_close(gradient_R, make_tensor(*expected_gradient), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(entropy_gradient_R, -0.01 * rows.weight_R, rtol=1e-11, atol=1e-11)
    assert numbers(metrics) == pytest.approx(expected, rel=1e-11, abs=1e-11)
    assert {name for name in numbers(metrics) if name.endswith("_max")} == metrics.maxima.keys()
    assert {f"{name}_max" for name in metrics.histograms} < metrics.maxima.keys()


@pytest.mark.known_failure("micro-batch-means")
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("cut", [0, 1, 3, 4])
def test_two_halves_add_up_to_the_whole(name: str, cut: int, correction: str) -> None:
    """The losses and metric sums of two parts, cut between any two sequences, add up to those of
    the whole batch."""
    lengths = [5, 1, 8, 3]
    algo = dataclasses.replace(ALGO, name=name, rollout_correction=correction, geo_mask_high=1.2, k3_mask_high=0.1)

    def part(chosen: slice) -> tuple[float, torch.Tensor, torch.Tensor, LossMetrics]:
        rows = make_random_loss_inputs(7, lengths)
        given = {field.name: getattr(rows, field.name) for field in dataclasses.fields(LossInputs)}
        columns = {name: column[chosen].detach() for name, column in given.items() if isinstance(column, torch.Tensor)}
        leaves = {leaf: columns[leaf].clone().requires_grad_() for leaf in ("logprob_R", "entropy_R")}
        return loss_and_gradient(LossInputs(**columns | leaves), algo)

    border = sum(lengths[:cut])
    whole, first, second = part(slice(None)), part(slice(border)), part(slice(border, None))
    assert first[0] + second[0] == pytest.approx(whole[0], rel=1e-12)
    torch.testing.assert_close(torch.cat([first[1], second[1]]), whole[1], rtol=1e-14, atol=1e-14)
    for metric, value in whole[3].sums.items():
        torch.testing.assert_close(first[3].sums[metric] + second[3].sums[metric], value, rtol=1e-12, atol=1e-12)
    for metric, value in whole[3].histograms.items():
        assert torch.equal(first[3].histograms[metric] + second[3].histograms[metric], value) and value.sum() == sum(lengths)
    for metric, value in whole[3].maxima.items():
        assert torch.equal(torch.maximum(first[3].maxima[metric], second[3].maxima[metric]), value)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_rows_are_a_loss_of_zero_with_the_usual_metrics(name: str) -> None:
    """Without sampled tokens the loss is 0, and all usual metrics are present with value 0."""
    algo = dataclasses.replace(ALGO, name=name, rollout_correction="token_tis")
    loss, gradient_R, _, metrics = loss_and_gradient(make_random_loss_inputs(1, []), algo)
    assert (loss, gradient_R.tolist()) == (0.0, [])
    assert numbers(metrics) == dict.fromkeys(numbers(loss_and_gradient(make_random_loss_inputs(1, [4, 5]), algo)[3]), 0.0)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_stands_at_tokens_that_were_not_sampled_reaches_nothing(name: str, garbage: float) -> None:
    """Filling unsampled entries of a packed batch with NaN, inf or 1e30 changes no bit of loss,
    gradient and metrics."""
    contexts = [
        context for rollout in (make_rollout(0, 1.0, lengths=(2, 3)), make_rollout(0, 0.0, lengths=(1,))) for context in rollout.sequences
    ]
    results = []
    for filling in (0.0, garbage):
        packed = [make_pack_item(context, advantage=place - 0.5, weight=1.0) for place, context in enumerate(contexts)]
        batch = packing.pack(
            packed, image_token_id=9, positions=lambda ids, images: torch.zeros(3, len(ids), dtype=torch.long), multiple_of=4
        )
        logprob_T = torch.linspace(-3, -0.5, batch.num_tokens)
        batch.old_logprob_T, batch.ref_logprob_T = logprob_T - 0.1, logprob_T + 0.2
        for column_T in (batch.old_logprob_T, batch.ref_logprob_T, batch.advantage_T, batch.rollout_logprob_T, batch.weight_T):
            column_T.masked_fill_(~batch.mask_T, filling)
        rows_R = batch.mask_T.nonzero().flatten()
        logprob_R = logprob_T[rows_R].requires_grad_()
        loss, metrics = make_policy_objective(dataclasses.replace(ALGO, name=name))(
            packing.make_loss_inputs(batch, rows_R, logprob_R, torch.ones(len(rows_R)))
        )
        results.append((loss.item(), torch.autograd.grad(loss, logprob_R)[0].tolist(), numbers(metrics)))
    assert math.isfinite(results[0][0]) and len(results[0][1]) == 6
    assert results[0] == results[1]


@pytest.mark.parametrize("in_reward", [False, True])
def test_what_is_no_term_of_the_loss_is_only_measured(in_reward: bool) -> None:
    """Without coefficients, or with the KL in the reward, the loss is the policy loss alone and
    entropy and KL are only metrics. Without reference logprobs the policy/kl_ref metric is absent.
    """
    rows = make_random_loss_inputs(3, [9, 7])
    algo = dataclasses.replace(ALGO, kl_coef=0.1 * in_reward, use_kl_in_reward=in_reward, entropy_coef=0.0)
    expected = (rows.weight_R * ALGORITHMS["grpo"].policy_loss(rows, algo)).sum().item()
    measured, bare = loss_and_gradient(rows, algo), loss_and_gradient(dataclasses.replace(rows, ref_logprob_R=None), algo)
    assert measured[0] == bare[0] == pytest.approx(expected, abs=1e-12)
    assert torch.equal(measured[1], bare[1]) and not measured[2].any()
    assert numbers(measured[3]).keys() - numbers(bare[3]).keys() == {"policy/kl_ref"}


def test_a_token_far_from_the_reference_adds_its_bound_and_no_gradient() -> None:
    """A token with log(reference / policy) = 8 has k3 = 3e3, which is bounded at 10 and adds no
    gradient. Only the policy's gradient, -A, remains."""
    rows = make_loss_inputs([0.0], [2.0], ref_logprob=[7.0], weight=[0.5])
    loss, gradient_R, *_ = loss_and_gradient(rows, dataclasses.replace(ALGO, entropy_coef=0.0))
    assert (loss, gradient_R.tolist()) == (0.5 * (-2.0 + 0.1 * 10.0), [-1.0])


def test_the_warm_starts_loss_by_hand() -> None:
    """The SFT loss is the weighted negative logprob, and its gradient is minus the weight."""
    # The loss is 1 * 0.5 + 2 * 0.25 = 1; the gradient is minus the weight.
    rows = make_loss_inputs([0.5, 1.75], [0.0, 0.0], weight=[1.0, 2.0], entropy=[0.5, 0.25])
    loss, metrics = make_sft_objective()(rows)
    loss.backward()
    assert (loss.item(), rows.logprob_R.grad.tolist()) == (1.0, [-1.0, -2.0])
    assert numbers(metrics) == {"policy/entropy": 0.75}


@pytest.mark.parametrize(("teacher_alone", "expected", "gradient"), [(False, 1.0 + 4.5, [-1.0, -2.0]), (True, 4.5, None)])
def test_a_teachers_term_in_the_warm_start_by_hand(teacher_alone: bool, expected: float, gradient: list[float] | None) -> None:
    """The divergences 2 and 3.5 with the weights 1 and 2 and the coefficient 0.5 add 0.5 * (2 + 7)
    = 4.5; without the log-likelihood, the tokens' logprobs have no gradient."""
    rows = make_loss_inputs([0.5, 1.75], [0.0, 0.0], weight=[1.0, 2.0], entropy=[0.5, 0.25])
    rows = dataclasses.replace(rows, divergence_R=torch.tensor([2.0, 3.5], requires_grad=True))
    term = DistillTerm(coef=0.5, divergence=read_divergence)
    loss, metrics = make_sft_objective(distill=term, teacher_alone=teacher_alone)(rows)
    loss.backward()
    assert loss.item() == expected
    assert rows.divergence_R.grad.tolist() == [0.5, 1.0]
    assert (rows.logprob_R.grad.tolist() if rows.logprob_R.grad is not None else None) == gradient
    assert numbers(metrics) == {"policy/entropy": 0.75, "distill/divergence": 5.5, "sft/nll": -sum(rows.logprob_R.tolist())}


# Effect of each setting ---------------------------------------------------------------------------

GROUP = {"grpo", "gspo", "cispo", "sapo", "gmpo", "dppo"}
"""Algorithms with GRPO's advantages."""
BY_TURN, CLIPPED = GROUP - {"gspo", "gmpo"}, {"grpo", "rloo", "opo", "reinforce_pp", "gspo", "ppo", "ppo_turn"}
EVERY, CRITIC = set(ALGORITHMS) - {"distill"}, {"ppo", "ppo_turn"}  # distill has no advantages
KL, TO_GO, TIS = {"kl_coef": 0.1}, {"turn_credit": "return_to_go"}, {"rollout_correction": "token_tis"}
BOUNDS = {"token_mask_low": 0.9, "token_mask_high": 1.1, "sequence_mask_low": 0.9, "sequence_mask_high": 1.1}
BOUNDS |= {"geo_mask_low": 0.5, "geo_mask_high": 1.5, "k3_mask_high": 0.1, "opsm_delta": 2.0}
WIRING: dict[str, tuple[object, dict, set[str]]] = {
    "norm_adv_by_std": (False, {}, GROUP),
    "std_eps": (0.5, {}, GROUP),
    "turn_credit": ("outcome_and_turn", {}, BY_TURN),
    "gamma": (0.5, TO_GO, BY_TURN),
    "gigpo_step_weight": (0.5, {"turn_credit": "gigpo"}, BY_TURN),
    "gae_level": ("turns", {}, CRITIC),
    "lam": (0.5, {}, CRITIC),
    "bootstrap_truncated": (True, {}, CRITIC),
    "whiten_advantages": (False, {}, CRITIC),
    "clip_ratio_low": (0.4, {}, EVERY - {"sapo"}),
    "clip_ratio_high": (0.4, {}, EVERY - {"sapo"}),
    "clip_ratio_c": (1.2, {}, CLIPPED),
    "sapo_tau_positive": (2.0, {}, {"sapo"}),
    "sapo_tau_negative": (2.0, {}, {"sapo"}),
    "kl_coef": (0.1, {}, EVERY),
    "kl_estimator": ("k2", KL, EVERY),
    "use_kl_in_reward": (True, KL, EVERY),
    "thought_logprob_scale": (0.5, {}, EVERY),
    "entropy_coef": (0.1, {}, EVERY),
    "rollout_correction": ("token_tis", {}, EVERY),
    "rollout_correction_level": ("turns", {"rollout_correction": "sequence_tis"}, EVERY),
    "is_weight_cap": (1.1, TIS, EVERY),
    **{name: (value, {"rollout_correction": name.rpartition("_")[0]}, EVERY) for name, value in BOUNDS.items()},
}
"""For each setting: a value that is not its default, the other settings that it requires to have an
effect, and the algorithms that it affects."""


def moved_by(algo: AlgoSettings) -> tuple[list[float], float, list[float]]:
    """Return advantages, loss and gradient of two groups of three off-policy episodes with one to
    three turns."""
    lengths = ((2, 1, 3), (4,), (1, 2)) * 2
    rollouts = [
        set_states(
            make_rollout(number // 3, outcome_reward=number**2 / 7, step_scores=[0.3 * number, -0.5, 1.0][: len(each)], lengths=each),
            "dealt",
        )
        for number, each in enumerate(lengths)
    ]
    for number, rollout in enumerate(rollouts):
        set_kl_logprobs(rollout, *(0.3 * math.sin(number + place) for place in range(rollout.num_sampled)))
        for context in rollout.sequences:
            context.set_column("values", [math.cos(number + place) for place in range(len(context.token_ids))])
        rollout.final_state = TokenSequence([1], [1], values=[0.5])
        for turn in rollout.turns:
            turn.action_start = turn.token_span[1] - 1
    scale_thought_logprobs(rollouts, algo.thought_logprob_scale)
    coefficients = [
        c.logprob_scale[place] for each in rollouts for c in each.sequences for place, sampled in enumerate(c.loss_mask) if sampled
    ]
    ALGORITHMS[algo.name].advantage_fn(rollouts, algo)
    credits = [credit for rollout in rollouts for context in rollout.sequences for credit in context.advantages if credit]
    segments = [number for number, each in enumerate(lengths) for _ in range(sum(each))]
    turns = [turn for turn, length in enumerate(length for each in lengths for length in each) for _ in range(length)]
    size = len(segments)
    assert len(credits) == size, "no token has a credit of 0"
    generator = torch.Generator().manual_seed(0)
    d, gap, reference = (0.5 * torch.randn(3, size, generator=generator, dtype=torch.float64)).tolist()
    d = [each + (0.6 if segment % 2 else -0.6) for each, segment in zip(d, segments, strict=True)]
    old = [-1.0] * size
    rows = make_loss_inputs(
        d, credits, segments=segments, turns=turns, logprob_scale=coefficients, old=old, rollout_logprob=[-1.0 + g for g in gap],
        ref_logprob=[-1.0 + r for r in reference], entropy=[0.5] * size,
    )  # fmt: skip
    loss, gradient_R, *_ = loss_and_gradient(rows, algo)
    return credits, loss, gradient_R.tolist()


@pytest.mark.parametrize("field", WIRING)
def test_a_setting_moves_the_rows_that_it_should_and_no_other(field: str) -> None:
    """Changing a setting changes advantages, loss or gradient of exactly the algorithms that the
    table lists."""
    value, base, rows = WIRING[field]
    assert value != getattr(AlgoSettings(), field), "a default moves nothing"
    moved = set()
    dual_clipped = [name for name in EVERY if ALGORITHMS[name].supports_dual_clip]
    takers = {"turn_credit": BY_TURN, "gamma": BY_TURN, "gigpo_step_weight": BY_TURN, "clip_ratio_c": dual_clipped}
    takers["bootstrap_truncated"] = CRITIC
    for name in takers.get(field, EVERY):  # the other algorithms reject these settings
        before = AlgoSettings(name=name, **base)
        after = dataclasses.replace(before, **{field: value})
        check_algorithm(after)
        if moved_by(before) != moved_by(after):
            moved.add(name)
    assert moved == rows


def test_every_setting_is_wired() -> None:
    """The table covers all settings of algo except seven.

    The policy uses the temperature, the routing replay (tests/parity/test_routing_replay.py) and
    the losses of routers (tests/parity/test_router_losses.py), the table of algorithms uses the
    name, and the training loop adapts kl_coef (tests/test_training_loop_scripted.py).
    """
    elsewhere = {"name", "temperature", "kl_target", "kl_horizon", "routing_replay", "router_aux_loss_coef", "router_z_loss_coef"}
    assert WIRING.keys() == {field.name for field in dataclasses.fields(AlgoSettings)} - elsewhere
