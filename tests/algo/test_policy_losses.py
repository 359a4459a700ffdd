"""Policy losses against values computed by hand, token-by-token textbook loops in plain floats, and
analytic gradients."""

import math
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algo import policy_losses
from megatron_rl.algo.algorithms import ALGORITHMS
from megatron_rl.algo.kl import MAX_LOG_RATIO
from megatron_rl.algo.policy_losses import MAX_DPPO_RATIO, mean_by_id
from megatron_rl.config import AlgoSettings
from megatron_rl.types import LossInputs
from tests.support.random_loss_inputs import make_loss_inputs, make_random_loss_inputs, make_tensor, to_floats

CLIPS = AlgoSettings(clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=3.0)
LOG_15, LOG_05 = math.log(1.5), math.log(0.5)


def losses_and_gradient(surrogate: policy_losses.PolicyLossFn, rows: LossInputs, algo: AlgoSettings) -> tuple[list[float], list[float]]:
    """Return the loss of each token and the gradient of the summed loss in the logprobs."""
    loss_R = surrogate(rows, algo)
    (gradient_R,) = torch.autograd.grad(loss_R.sum(), rows.logprob_R)
    return loss_R.tolist(), gradient_R.tolist()


def near(*values: float) -> Callable:
    return pytest.approx(list(values), abs=1e-12)


# Values computed by hand --------------------------------------------------------------------------

CASES = [  # ratio, advantage, loss = -max(min(r A, clip(r, 0.8, 1.3) A), 3 A if A < 0), dloss / dlogprob = -r A, or 0 where bounded
    (1.0, 2.0, -2.0, -2.0),  # on-policy: -A, gradient -A
    (1.2, 2.0, -2.4, -2.4),  # inside: -1.2 * 2
    (1.5, 2.0, -2.6, 0.0),  # above the upper bound: loss -1.3 * 2
    (0.5, 2.0, -1.0, -1.0),  # a positive advantage has no lower bound: loss -0.5 * 2
    (1.0, -2.0, 2.0, 2.0),
    (0.5, -2.0, 1.6, 0.0),  # below the lower bound: loss 0.8 * 2
    (2.0, -2.0, 4.0, 4.0),  # a negative advantage has no upper bound: loss 2 * 2
    (5.0, -2.0, 6.0, 0.0),  # the dual clip bounds the loss of a negative advantage: 3 * 2
    (5.0, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient"), CASES)
def test_clipped_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    """PPO's clipped loss and its gradient equal values computed by hand."""
    rows = make_loss_inputs([math.log(ratio)], [advantage])
    assert losses_and_gradient(policy_losses.ppo_clip, rows, CLIPS) == (near(loss), near(gradient))


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient"), CASES)
def test_gspo_is_the_same_with_one_ratio_for_a_context(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    """GSPO has the loss and gradient of PPO's clip at the sequence's ratio.

    Three tokens have ratios whose geometric mean is `ratio`; two tokens of another sequence are
    on-policy.
    """
    d = math.log(ratio)
    rows = make_loss_inputs([3 * d, -d, d, 0.0, 0.0], [advantage] * 3 + [1.0] * 2, segments=[2, 2, 2, 5, 5])
    expected = (near(*[loss] * 3, -1.0, -1.0), near(*[gradient] * 3, -1.0, -1.0))
    assert losses_and_gradient(policy_losses.gspo, rows, CLIPS) == expected


def test_gspo_by_hand() -> None:
    """Ratios of 1.5 and 0.5 have the geometric mean sqrt(0.75) = 0.8660.

    Over n tokens, loss and gradient equal n times those of the single ratio exp(mean log r).
    """
    rows = make_loss_inputs([LOG_15, LOG_05], [1.0, 1.0])
    ratio = math.sqrt(0.75)
    assert losses_and_gradient(policy_losses.gspo, rows, CLIPS) == (near(-ratio, -ratio), near(-ratio, -ratio))
    assert ratio == pytest.approx(0.8660, abs=5e-5)
    narrow = AlgoSettings(clip_ratio_low=3e-4, clip_ratio_high=4e-4)
    assert losses_and_gradient(policy_losses.gspo, make_loss_inputs([LOG_15, LOG_05], [-1.0, -1.0]), narrow) == (
        near(0.9997, 0.9997), near(0.0, 0.0),
    )  # fmt: skip
    above = make_loss_inputs([LOG_15, 0.0], [1.0, 1.0])
    assert losses_and_gradient(policy_losses.gspo, above, narrow) == (near(-1.0004, -1.0004), near(0.0, 0.0))


def test_gmpo_by_hand() -> None:
    """GMPO equals values computed by hand, for ratios 1.5 and 0.5 and bounds exp(-0.2) and
    exp(0.28). Every token has the loss of its sequence.

    For A = 1 the upper bound clips the first token: exp((0.28 - 0.6931) / 2) = 0.8134, and that
    token has no gradient. For A = -1 the lower bound clips the second token: exp((0.4055 - 0.2) /
    2).
    """
    algo = AlgoSettings(clip_ratio_low=0.2, clip_ratio_high=0.28)
    value = math.exp((0.28 + LOG_05) / 2)
    assert value == pytest.approx(0.8134, abs=5e-5)
    rows = make_loss_inputs([LOG_15, LOG_05, 0.1], [1.0, 1.0, -2.0], segments=[0, 0, 4])
    assert losses_and_gradient(policy_losses.gmpo, rows, algo) == (
        near(-value, -value, 2 * math.exp(0.1)), near(0.0, -value, 2 * math.exp(0.1)),
    )  # fmt: skip
    negative = math.exp((LOG_15 - 0.2) / 2)
    rows = make_loss_inputs([LOG_15, LOG_05], [-1.0, -1.0])
    assert losses_and_gradient(policy_losses.gmpo, rows, algo) == (near(negative, negative), near(negative, 0.0))
    assert losses_and_gradient(policy_losses.gmpo, make_loss_inputs([LOG_15, 5.0], [0.0, 0.0]), algo) == (near(0, 0), near(0, 0))


def test_sapo_by_hand() -> None:
    """SAPO equals values computed by hand.

    At steepness 1 the gates are 2.4898 at ratio 1.5 and 1.5102 at ratio 0.5. The slope of 4 / tau
    sigmoid(tau (r - 1)) is 4 r s (1 - s).
    """
    algo = AlgoSettings(sapo_tau_positive=1.0, sapo_tau_negative=2.0)

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    up, down = 4 * sigmoid(0.5), 4 * sigmoid(-0.5)
    assert (up, down) == (pytest.approx(2.4898, abs=5e-5), pytest.approx(1.5102, abs=5e-5))
    rows = make_loss_inputs([LOG_15, LOG_05, LOG_15, 0.0, LOG_15], [1.0, 3.0, -1.0, -1.0, 0.0])
    slope = 4 * sigmoid(0.5) * sigmoid(-0.5)
    negative = 2 * sigmoid(1.0)  # 4 / 2
    assert losses_and_gradient(policy_losses.sapo, rows, algo) == (
        near(-up, -3 * down, negative, 1.0, 0.0),
        near(-1.5 * slope, -3 * 0.5 * slope, 1.5 * 4 * sigmoid(1.0) * sigmoid(-1.0), 1.0, 0.0),
    )


def test_cispo_by_hand() -> None:
    """CISPO clips the weight regardless of the advantage's sign, and every token keeps the gradient
    -weight * A. Logprobs in this test are log r - 1."""
    rows = make_loss_inputs([LOG_15, LOG_05, 0.1, LOG_15], [2.0, 2.0, 2.0, -2.0], old=[-1.0] * 4)
    weights = (1.3, 0.8, math.exp(0.1), 1.3)
    logprobs, advantages = (LOG_15 - 1, LOG_05 - 1, -0.9, LOG_15 - 1), (2.0, 2.0, 2.0, -2.0)
    expected = [-weight * a for weight, a in zip(weights, advantages, strict=True)]
    values = [slope * logprob for slope, logprob in zip(expected, logprobs, strict=True)]
    assert losses_and_gradient(policy_losses.cispo, rows, CLIPS) == (near(*values), near(*expected))
    unbounded = losses_and_gradient(policy_losses.cispo, rows, AlgoSettings(clip_ratio_low=1.0, clip_ratio_high=0.3))[1]
    assert unbounded == near(-2.6, -1.0, -2 * math.exp(0.1), 2.6), "clip_low=1 is no lower bound"


@pytest.mark.parametrize(
    ("old", "now", "advantage", "kept"),
    [  # probability at the start of the step, current probability; the bounds are -0.2 and 0.3
        (0.5, 0.79, 1.0, True), (0.5, 0.81, 1.0, False), (0.5, 0.81, -1.0, True), (0.9, 0.1, 1.0, True),
        (0.5, 0.31, -1.0, True), (0.5, 0.29, -1.0, False), (0.5, 0.29, 1.0, True), (0.01, 0.29, 1.0, True),
    ],
)  # fmt: skip
def test_dppo_by_hand(old: float, now: float, advantage: float, kept: bool) -> None:
    """DPPO's loss is -sg(min(r, 20)) A logprob, or 0 if the probability change exceeds a bound.

    The last case has a ratio of 29 and a probability change of 0.28.
    """
    rows = make_loss_inputs([math.log(now / old)], [advantage], old=[math.log(old)])
    slope = -min(now / old, 20.0) * advantage * kept
    assert MAX_DPPO_RATIO == 20.0
    assert losses_and_gradient(policy_losses.dppo, rows, CLIPS) == (near(slope * math.log(now)), near(slope))


def test_dual_clip_zero_is_off() -> None:
    """clip_ratio_c = 0 disables the dual clip."""
    # At r = 5 and A = -2 the loss is 5 * 2 = 10; a dual clip of 3 would make it 6.
    rows, off = make_loss_inputs([math.log(5.0)], [-2.0]), AlgoSettings(clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=0.0)
    assert losses_and_gradient(policy_losses.ppo_clip, rows, off) == (near(10.0), near(10.0))
    assert losses_and_gradient(policy_losses.gspo, rows, off) == (near(10.0), near(10.0))


@pytest.mark.parametrize("surrogate", [policy_losses.ppo_clip, policy_losses.gspo])
def test_the_dual_clip_bounds_negative_advantages_alone(surrogate: policy_losses.PolicyLossFn) -> None:
    """The dual clip of 1.1, which is below 1 + clip_high, bounds negative advantages only.

    At r = 1.25 the loss is 1.1 * 2 for A = -2 and -1.25 * 2 for A = 2.
    """
    algo = AlgoSettings(clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=1.1)
    rows = make_loss_inputs([math.log(1.25)] * 2, [2.0, -2.0], segments=[0, 1])
    assert losses_and_gradient(surrogate, rows, algo) == (near(-2.5, 2.2), near(-2.5, 0.0))


# Properties of all policy losses ------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("clip", [0.0, 0.2, 1.0])
def test_on_policy_the_gradient_is_reinforce_even_with_an_empty_clip_range(name: str, clip: float) -> None:
    """At ratio 1 every policy loss has the gradient -A, for every clip range including an empty
    one."""
    advantages = [1.5, 1.5, 1.5, -0.5, -0.5, 0.0]
    rows = make_loss_inputs([0.0] * 6, advantages, segments=[0, 0, 0, 1, 1, 3], turns=range(6))
    algo = AlgoSettings(name=name, clip_ratio_low=clip, clip_ratio_high=clip, clip_ratio_c=3.0)
    assert losses_and_gradient(ALGORITHMS[name].policy_loss, rows, algo)[1] == near(*(-a for a in advantages))


@pytest.mark.known_failure("ratio-overflow")
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0, 89.0, 21.0])
def test_extreme_ratios_stay_finite_in_float32(name: str, log_ratio: float, advantage: float) -> None:
    """Loss and gradient of every policy loss stay finite in float32 at extreme log ratios."""
    rows = make_loss_inputs([log_ratio], [advantage], old=[-1.0], dtype=torch.float32)
    (loss,), (gradient,) = losses_and_gradient(ALGORITHMS[name].policy_loss, rows, AlgoSettings(name=name, clip_ratio_low=1.0))
    assert math.isfinite(loss) and math.isfinite(gradient)
    assert abs(gradient) <= math.exp(MAX_LOG_RATIO) * 1.001


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0, -math.inf])
def test_extreme_ratios_by_hand_in_float32(log_ratio: float, advantage: float) -> None:
    """At extreme log ratios, PPO's loss equals the clipped loss of the capped ratio, and its
    gradient is 0."""
    rows = make_loss_inputs([log_ratio], [advantage], old=[0.0], dtype=torch.float32)
    (loss,), (gradient,) = losses_and_gradient(policy_losses.ppo_clip, rows, AlgoSettings())
    ratio = math.exp(min(log_ratio, MAX_LOG_RATIO))
    assert loss == pytest.approx(-min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage), rel=1e-6)
    assert gradient == 0.0  # clipped, stopped by the cap on log r, or multiplied by a ratio of 0


def test_mean_by_id_by_hand() -> None:
    """Means per id equal values computed by hand, for segments of 3, 1 and 2 tokens and for empty
    input. The ids have gaps, as in a batch with shared prompts."""
    assert mean_by_id(make_tensor(1, 2, 6, 5, 0, 1), torch.tensor([1, 1, 1, 4, 6, 6])).tolist() == [3, 3, 3, 5, 0.5, 0.5]
    assert mean_by_id(make_tensor(), torch.tensor([], dtype=torch.long)).tolist() == []


# Textbook loops -----------------------------------------------------------------------------------


def textbook(name: str, rows: LossInputs, algo: AlgoSettings) -> tuple[list[float], list[float], list[bool], list[bool]]:
    """Compute each token's loss, gradient, and lower and upper bound violations in plain floats,
    one sequence at a time."""
    columns = to_floats(rows)
    lo, hi, contexts = algo.clip_ratio_low, algo.clip_ratio_high, defaultdict(list)
    out: tuple[list, list, list, list] = tuple([0.0] * len(columns["old_logprob"]) for _ in range(4))
    for t, context in enumerate(columns["sequence"]):
        contexts[context].append(t)
    for tokens in contexts.values():
        d = [columns["logprob"][t] - columns["old_logprob"][t] for t in tokens]
        mean, count, a = sum(d) / len(d), len(d), columns["advantage"][tokens[0]]
        bounded = [max(-lo, min(hi, x)) if (x > hi) == (a > 0) else x for x in d]  # gmpo: the advantage's sign selects the bound
        whole = math.exp(sum(bounded) / count)
        for t, x, k in zip(tokens, d, bounded, strict=True):
            now, old = math.exp(columns["logprob"][t]), math.exp(columns["old_logprob"][t])
            r = math.exp({"gspo": mean, "ppo_turn": sum(d)}.get(name, x))  # each sequence of make_random_loss_inputs is one turn
            low, high = {"gmpo": (x < -lo, x > hi), "dppo": (now - old < -lo, now - old > hi), "sapo": (False, False)}.get(
                name, (r < 1 - lo, r > 1 + hi)
            )
            is_bound, logprob = (a > 0 and high) or (a < 0 and low), columns["logprob"][t]
            gate = {True: algo.sapo_tau_positive, False: algo.sapo_tau_negative}[a > 0]
            sigmoid = 1 / (1 + math.exp(-gate * (r - 1)))
            clip, dual = max(1 - lo, min(1 + hi, r)), a < 0 and r > algo.clip_ratio_c
            loss, slope = {
                "gmpo": (-a * whole, -a * whole * (k == x)),
                "cispo": (-clip * a * logprob, -clip * a),
                "sapo": (-4 / gate * sigmoid * a, -4 * sigmoid * (1 - sigmoid) * r * a),
                "dppo": (-min(r, 20) * a * logprob * (not is_bound), -min(r, 20) * a * (not is_bound)),
                "ppo_turn": (-a * (clip if is_bound else algo.clip_ratio_c if dual else r), 0.0 if is_bound or dual else -a * r * count),
            }.get(name, (-a * (clip if is_bound else algo.clip_ratio_c if dual else r), 0.0 if is_bound or dual else -a * r))
            for column, value in zip(out, (loss, slope, low, high), strict=True):
                column[t] = value
    return out


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.lists(st.integers(1, 9), max_size=5), st.sampled_from([0.1, 1.0]))
def test_surrogates_and_bounds_are_the_textbook_loop(name: str, seed: int, lengths: list[int], spread: float) -> None:
    """Losses, gradients and clip bounds of every algorithm equal the textbook loop on random
    tokens."""
    algo = AlgoSettings(name=name, clip_ratio_low=0.1, clip_ratio_high=0.2, clip_ratio_c=1.5, sapo_tau_positive=0.7, sapo_tau_negative=1.3)
    rows, algorithm = make_random_loss_inputs(seed, lengths, log_ratio_std=spread), ALGORITHMS[name]
    losses, gradient, below, above = textbook(name, rows, algo)
    assert losses_and_gradient(algorithm.policy_loss, rows, algo) == (
        pytest.approx(losses, rel=1e-12, abs=1e-12), pytest.approx(gradient, rel=1e-12, abs=1e-12),
    )  # fmt: skip
    below_R, above_R = algorithm.clip_bounds(rows, algo)
    assert (below_R.tolist(), above_R.tolist()) == (below, above)
    assert below_R.dtype == above_R.dtype == torch.bool
