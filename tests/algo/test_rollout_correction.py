"""Rollout corrections for mismatched engine logprobs, against values computed by hand and a loop in
plain floats."""

import dataclasses
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algo.algorithms import ALGORITHMS, check_algorithm
from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.algo.rollout_correction import CORRECTIONS, compute_is_weights
from megatron_rl.batching import packing
from megatron_rl.config import AlgoSettings
from megatron_rl.types import LossInputs, TokenSequence
from tests.support.packed_example import make_pack_item
from tests.support.random_loss_inputs import make_loss_inputs, make_random_loss_inputs
from tests.support.rollout_correction_oracle import textbook_weights

JOINED = ("token_tis+geo_mask", "bypass+geo_mask+opsm", "k3_mask+sequence_mask", "bypass+k3_mask")
EVERY = (*CORRECTIONS, *JOINED)
LOG3 = math.log(3)
WIDE = {"token_mask_low": 0.6, "token_mask_high": 2.5, "geo_mask_low": 0.8, "geo_mask_high": 1.3, "k3_mask_high": 0.1, "opsm_delta": 0.1}
"""Bounds that some of the random rows exceed and others do not."""


def rows_of(*gaps: float, segments: list[int] | None = None, dtype: torch.dtype = torch.float64, **given: list) -> LossInputs:
    """Build on-policy rows whose old logprob, -1, exceeds the engine's by each of `gaps`."""
    size, advantage = len(gaps), given.pop("advantage", [1.0] * len(gaps))
    return make_loss_inputs(
        [0.0] * size, advantage, old=[-1.0] * size, rollout_logprob=[-1.0 - gap for gap in gaps], segments=segments, dtype=dtype, **given
    )


CONTEXTS = [0, 0, 0, 3, 3]
GAPS = (LOG3, math.log(1.5), -LOG3, math.log(2), math.log(0.1))
"""log r of two sequences: r = 3, 1.5, 1/3, with product 1.5 and geometric mean 1.5 ** (1 / 3);
and r = 2, 0.1, with product 0.2 and geometric mean 0.2 ** (1 / 2)."""


@pytest.mark.parametrize(
    ("correction", "given", "weights"),
    [
        ("none", {}, [1, 1, 1, 1, 1]),
        ("bypass", {}, [1, 1, 1, 1, 1]),
        ("token_tis", {}, [2, 1.5, 1 / 3, 2, 0.1]),
        ("token_tis", {"is_weight_cap": 5.0}, [3, 1.5, 1 / 3, 2, 0.1]),
        ("sequence_tis", {}, [1.5, 1.5, 1.5, 0.2, 0.2]),
        ("sequence_tis", {"is_weight_cap": 1.25}, [1.25, 1.25, 1.25, 0.2, 0.2]),
        ("token_mask", {}, [3, 1.5, 0, 2, 0]),  # 1/3 and 0.1 are below 0.5
        ("token_mask", {"token_mask_low": 0.3, "token_mask_high": 1.9}, [0, 1.5, 1 / 3, 0, 0]),
        ("sequence_mask", {}, [1.5, 1.5, 1.5, 0.2, 0.2]),
        ("sequence_mask", {"sequence_mask_low": 0.5}, [1.5, 1.5, 1.5, 0, 0]),
        ("sequence_mask", {"sequence_mask_high": 1.4}, [0, 0, 0, 0.2, 0.2]),
        ("geo_mask", {}, [0, 0, 0, 0, 0]),
        ("geo_mask", {"geo_mask_high": 1.15}, [1, 1, 1, 0, 0]),  # 1.1447
        ("geo_mask", {"geo_mask_low": 0.44}, [0, 0, 0, 1, 1]),  # 0.4472
        ("k3_mask", {"k3_mask_high": 0.48}, [1, 1, 1, 0, 0]),  # (3 + 1.5 + 1/3 - 3 - log 1.5) / 3 = 0.4760; (2.1 - 2 + log 5) / 2 = 0.8547
        ("k3_mask", {"k3_mask_high": 0.47}, [0, 0, 0, 0, 0]),
        ("token_tis+geo_mask", {"geo_mask_high": 1.15}, [2, 1.5, 1 / 3, 0, 0]),
    ],
)
def test_weights_by_hand(correction: str, given: dict, weights: list[float]) -> None:
    """Correction weights of two sequences equal values computed by hand."""
    algo = AlgoSettings(rollout_correction=correction, **given)
    check_algorithm(algo)
    assert compute_is_weights(rows_of(*GAPS, segments=CONTEXTS), algo).tolist() == pytest.approx(weights, abs=1e-12)


@pytest.mark.parametrize(
    ("correction", "weights"), [("sequence_tis", [2.0, 0.0]), ("sequence_mask", [0.0, 0.0]), ("sequence_mask+k3_mask", [0.0, 0.0])]
)
def test_long_sequences_have_weights_in_float32(correction: str, weights: list[float]) -> None:
    """Sequence weights stay finite in float32 for 300 tokens at r = 2 and 300 at r = 1/2.

    The products 2^300 and 2^-300 are beyond float32, and inf * 0 would be NaN.
    """
    gaps = [math.log(2)] * 300 + [-math.log(2)] * 300
    found = compute_is_weights(
        rows_of(*gaps, segments=[0] * 300 + [1] * 300, dtype=torch.float32), AlgoSettings(rollout_correction=correction)
    )
    assert found.tolist() == pytest.approx([weights[0]] * 300 + [weights[1]] * 300, abs=1e-8)


def test_opsm_by_hand() -> None:
    """OPSM equals masks computed by hand, for sequence means of (engine logprob - logprob) of 0.6,
    0.4 and 0.6. Only tokens with a negative advantage are masked, and the old logprob has no
    effect."""
    engine = [0.1, 1.1, 0.4, 0.2, 1.0]
    rows = make_loss_inputs([0.0] * 5, [-1.0, 1.0, -1.0, -2.0, -1.0], old=[0.0] * 5, rollout_logprob=engine, segments=[0, 0, 1, 2, 2])
    for each in (rows, dataclasses.replace(rows, old_logprob_R=rows.rollout_logprob_R)):
        assert compute_is_weights(each, AlgoSettings(rollout_correction="opsm")).tolist() == [0, 1, 1, 0, 0]
        assert compute_is_weights(each, AlgoSettings(rollout_correction="opsm", opsm_delta=0.3)).tolist() == [0, 1, 0, 0, 0]
        assert compute_is_weights(each, AlgoSettings(rollout_correction="opsm", opsm_delta=0.7)).tolist() == [1, 1, 1, 1, 1]


def test_a_sequence_may_be_a_turn() -> None:
    """With rollout_correction_level=turns, products are computed per turn.

    A sequence of two turns with r = 4, 1/2 | 1/4 has products 2 and 1/4 per turn, and 1/2 over the
    sequence.
    """
    rows = rows_of(math.log(4), -math.log(2), -math.log(4), turns=[0, 0, 1])
    by_turn = AlgoSettings(rollout_correction="sequence_mask", rollout_correction_level="turns")
    assert compute_is_weights(rows, AlgoSettings(rollout_correction="sequence_mask")).tolist() == pytest.approx([0.5] * 3, abs=1e-14)
    assert compute_is_weights(rows, by_turn).tolist() == pytest.approx([2.0, 2.0, 0.25], abs=1e-14)
    geo = AlgoSettings(rollout_correction="geo_mask", rollout_correction_level="turns", geo_mask_high=1.5)
    assert compute_is_weights(rows, geo).tolist() == [1.0, 1.0, 0.0]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.lists(st.integers(1, 9), max_size=5), st.sampled_from(EVERY), st.booleans())
def test_weights_are_the_textbooks(seed: int, lengths: list[int], correction: str, by_turn: bool) -> None:
    """Correction weights equal the loop in plain floats on random tokens, per sequence and per
    turn."""
    by_turn = by_turn and any(CORRECTIONS[name].by_sequence for name in correction.split("+"))
    algo = AlgoSettings(rollout_correction=correction, rollout_correction_level="turns" if by_turn else "sequences", **WIDE)
    rows = make_random_loss_inputs(seed, lengths)
    rows = dataclasses.replace(rows, turn_R=torch.arange(sum(lengths)) // 2)
    check_algorithm(algo)
    expected = textbook_weights(
        algo,
        log_r=(rows.old_logprob_R - rows.rollout_logprob_R).tolist(),
        drift=(rows.rollout_logprob_R - rows.logprob_R).tolist(),
        advantage=rows.advantage_R.tolist(),
        sequence=(rows.turn_R if by_turn else rows.sequence_R).tolist(),
    )
    assert compute_is_weights(rows, algo).tolist() == pytest.approx(expected, rel=1e-10)


@pytest.mark.known_failure("ratio-overflow")
@pytest.mark.parametrize("gap", [1000.0, 89.0, 20.0, -20.0, -1000.0, math.inf, -math.inf])
@pytest.mark.parametrize("correction", EVERY)
def test_weights_stay_finite_in_float32(correction: str, gap: float) -> None:
    """Weights stay finite in float32 because log r is clamped to [-20, 20]."""
    algo = AlgoSettings(rollout_correction=correction, sequence_mask_high=math.inf, token_mask_low=0.0, token_mask_high=math.inf)
    (weight,) = compute_is_weights(rows_of(gap, dtype=torch.float32), algo).tolist()
    held = math.exp(math.copysign(20, gap))
    masked = {"geo_mask", "k3_mask"} & set(correction.split("+"))
    ratio = {"token_tis": min(held, 2.0), "sequence_tis": min(held, 2.0), "token_mask": held, "sequence_mask": held}
    assert weight == pytest.approx(0.0 if masked else ratio.get(correction, 1.0), rel=1e-6)
    both = compute_is_weights(rows_of(gap, -gap, dtype=torch.float32), dataclasses.replace(algo, rollout_correction="sequence_tis"))
    assert both.tolist() == [1.0, 1.0], "tokens are held before they are summed"


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("correction", EVERY)
def test_where_engine_and_trainer_agree_nothing_is_corrected(name: str, correction: str) -> None:
    """If engine and trainer logprobs are equal, loss and gradient equal those without a correction,
    bit for bit. Rows are on-policy for bypass and opsm, which use the current logprobs, and
    off-policy for the others."""
    looks_at_now = {"bypass", "opsm"} & set(correction.split("+"))
    results = []
    for each in ("none", correction):
        rows = make_random_loss_inputs(3, [4, 1, 7], log_ratio_std=0.0 if looks_at_now else 0.7)
        rows.rollout_logprob_R.copy_(rows.old_logprob_R)
        loss, metrics = make_policy_objective(AlgoSettings(name=name, rollout_correction=each, kl_coef=0.1, entropy_coef=0.01))(rows)
        results.append((loss.item(), torch.autograd.grad(loss, rows.logprob_R)[0].tolist()))
        told = {metric: value.item() for metric, value in metrics.sums.items() if re.search("is_weight|truncated|masked", metric)}
        share = {
            "rollout_mismatch/is_weight": 12,
            "rollout_mismatch/is_weight_squared": 12,
            "rollout_mismatch/is_truncated_fraction": 0,
            "rollout_mismatch/masked_fraction": 0,
        }
        assert told == ({} if each == "none" else share)
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("correction", EVERY)
def test_weights_multiply_the_surrogate_alone_and_are_constants(name: str, correction: str) -> None:
    """Correction weights multiply only the policy loss and carry no gradient.

    Loss and gradient are compared with a term-by-term sum that takes its weights from the loop in
    plain floats.
    """
    rows = make_random_loss_inputs(4, [3, 4, 2, 6])
    algo = AlgoSettings(name=name, rollout_correction=correction, kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01, **WIDE)
    loss, _ = make_policy_objective(algo)(rows)
    weights = textbook_weights(
        algo,
        log_r=(rows.old_logprob_R - rows.rollout_logprob_R).tolist(),
        drift=(rows.rollout_logprob_R - rows.logprob_R).tolist(),
        advantage=rows.advantage_R.tolist(),
        sequence=rows.sequence_R.tolist(),
    )
    assert correction in ("none", "bypass") or len(set(weights)) > 1
    compared = dataclasses.replace(rows, old_logprob_R=rows.rollout_logprob_R) if "bypass" in correction else rows
    kl_R, entropy_R = (rows.logprob_R - rows.ref_logprob_R) ** 2 / 2, rows.entropy_R
    surrogate_R = torch.tensor(weights, dtype=torch.float64) * ALGORITHMS[name].policy_loss(compared, algo)
    expected = (rows.weight_R * (surrogate_R + 0.1 * kl_R - 0.01 * entropy_R)).sum()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    leaves = (rows.logprob_R, rows.entropy_R)
    for found, wanted in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("correction", "gradient"), [("token_tis", [-1.5, 2.0, 0.1]), ("bypass", [-1.5, 3.0, 0.0]), ("opsm", [-1, 1, 0])])
def test_on_policy_the_weight_is_that_of_the_current_policy_and_has_no_gradient(correction: str, gradient: list[float]) -> None:
    """With one update per step, the old logprob is the detached current logprob and the weight has
    no gradient. token_tis has the gradient -min(r, 2) A. bypass has PPO's gradient -r A if r is
    within the bounds, which 0.1 is not. opsm has -A, or 0 if A < 0 and the engine's logprob is more
    than 0.5 above."""
    leaf = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64).requires_grad_()
    engine = [-1.0 - math.log(1.5), -1.0 - LOG3, -1.0 + math.log(10)]
    rows = make_loss_inputs([0.0] * 3, [1.0, -1.0, -1.0], old=[-1.0] * 3, rollout_logprob=engine, segments=[0, 1, 2])
    rows = dataclasses.replace(rows, logprob_R=leaf, old_logprob_R=leaf.detach())
    loss, _ = make_policy_objective(AlgoSettings(rollout_correction=correction, clip_ratio_high=0.6))(rows)
    loss.backward()
    assert leaf.grad.tolist() == pytest.approx(gradient, abs=1e-14)


@pytest.mark.parametrize("correction", EVERY)
def test_weights_have_no_gradient_whatever_they_are_made_of(correction: str) -> None:
    """Correction weights carry no gradient, even if the old logprobs do."""
    rows = make_random_loss_inputs(4, [3, 4])
    assert not compute_is_weights(
        dataclasses.replace(rows, old_logprob_R=rows.logprob_R), AlgoSettings(rollout_correction=correction)
    ).requires_grad


def test_decoupled_and_bypass_by_hand() -> None:
    """Losses equal values computed by hand for p / p0 = 1.5, p0 / m = 3 and A = 2.

    With token_tis (decoupled), PPO's clip applies to p / p0 and the weight is p0 / m. With bypass,
    the clip applies to p / m.
    """
    rows = make_loss_inputs([math.log(1.5)], [2.0], old=[-1.0], rollout_logprob=[-1.0 - LOG3])
    losses = {
        each: make_policy_objective(AlgoSettings(rollout_correction=each))(rows)[0].item() for each in ("none", "token_tis", "bypass")
    }
    assert losses == pytest.approx({"none": -1.2 * 2, "token_tis": -2 * 1.2 * 2, "bypass": -1.2 * 2}, abs=1e-14)
    wide = {
        each: make_policy_objective(AlgoSettings(rollout_correction=each, clip_ratio_high=9.0))(rows)[0].item()
        for each in ("none", "token_tis", "bypass")
    }
    assert wide == pytest.approx({"none": -1.5 * 2, "token_tis": -2 * 1.5 * 2, "bypass": -4.5 * 2}, abs=1e-14)


@pytest.mark.parametrize(
    ("correction", "given", "told"),
    [
        ("token_tis", {}, (5.6 + 1 / 3, 4 + 2.25 + 1 / 9 + 4 + 0.01, 2, 0)),  # weights 2, 1.5, 1/3, 2, 0.1
        ("sequence_tis", {"is_weight_cap": 1.5}, (4.9, 3 * 2.25 + 2 * 0.04, 3, 0)),
        ("token_mask", {}, (6.5, 9 + 2.25 + 4, 0, 2)),  # 3 is kept: is_weight_cap does not apply to token_mask
        ("geo_mask", {"geo_mask_high": 1.15}, (3, 3, 0, 2)),
        ("token_tis+geo_mask", {"geo_mask_high": 1.15}, (3.5 + 1 / 3, 4 + 2.25 + 1 / 9, 1, 2)),
        ("bypass", {}, (6.6 + 1 / 3, 9 + 2.25 + 1 / 9 + 4 + 0.01, 0, 0)),  # weights are r itself
        ("bypass+geo_mask", {"geo_mask_high": 1.15}, (4.5 + 1 / 3, 9 + 2.25 + 1 / 9, 0, 2)),
    ],
)
def test_metrics_by_hand(correction: str, given: dict, told: tuple[float, ...]) -> None:
    """Metrics of five tokens equal sums by hand: weights, squared weights, and numbers of truncated
    and masked tokens. The logprob difference is between trainer and engine for every correction."""
    _, metrics = make_policy_objective(AlgoSettings(rollout_correction=correction, **given))(rows_of(*GAPS, segments=CONTEXTS))
    names = ("is_weight", "is_weight_squared", "is_truncated_fraction", "masked_fraction")
    assert [metrics.sums[f"rollout_mismatch/{name}"].item() for name in names] == pytest.approx(told, abs=1e-12)
    assert metrics.sums["rollout_mismatch/logprob_abs_diff"].item() == pytest.approx(sum(map(abs, GAPS)), abs=1e-12)
    assert metrics.maxima["rollout_mismatch/logprob_abs_diff_max"].item() == pytest.approx(math.log(10), abs=1e-12)
    ratio = 3 + 1.5 + 1 / 3 + 2 + 0.1 if "bypass" in correction else 5.0
    assert metrics.sums["policy/ratio"].item() == pytest.approx(ratio, abs=1e-12)


def test_a_cap_that_float32_cannot_hold_is_reached_all_the_same() -> None:
    """A weight at a cap that float32 cannot represent exactly, 1.3, counts as truncated."""
    _, metrics = make_policy_objective(AlgoSettings(rollout_correction="token_tis", is_weight_cap=1.3))(
        rows_of(LOG3, 0.1, dtype=torch.float32)
    )
    assert metrics.sums["rollout_mismatch/is_truncated_fraction"].item() == 1.0


def context(*parts: tuple[list[int], list[float] | None]) -> TokenSequence:
    made = TokenSequence()
    for tokens, logprobs in parts:
        made.extend(tokens, logprobs=logprobs)
    return made


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("over", ["sequences", "turns"])
def test_the_sums_over_a_context_are_its_own_however_contexts_are_packed(share: bool, over: str) -> None:
    """Weights of packed sequences equal the weights of each sequence alone, with and without shared
    prompts. Some sequences share prefixes: one starts with tokens that another sampled, which count
    in the other only; one diverges in the middle of a response; one has two turns; two differ only
    in their logprobs."""
    made = [
        context(([5, 6, 7], None), ([11, 12, 13, 14], [-0.9, -1.3, -0.7, -1.1])),
        context(([5, 6, 7, 11, 12], None), ([13, 15], [-1.2, -0.6])),
        context(([5, 6, 7, 11, 12, 13, 14], None), ([16], [-0.5])),
        context(([5, 6, 7], None), ([11, 12], [-1.4, -0.8]), ([8, 8], None), ([17, 18], [-0.95, -1.05])),
        context(([5, 6, 7], None), ([11, 12, 13, 14], [-1.0, -1.0, -1.0, -0.4])),
        context(([4, 6], None), ([19, 20], [-1.6, -1.0])),
    ]
    packed = [make_pack_item(each, advantage=1.0 if number % 2 else -1.0) for number, each in enumerate(made)]
    how = {"image_token_id": 99, "positions": lambda ids, images: torch.zeros(3, len(ids), dtype=torch.long)}
    batch = packing.pack(packed, **how, share_prompts=share)
    assert any(place >= 0 for place in batch.prefix_S) == share and (batch.num_tokens < sum(len(each.token_ids) for each in made)) == share
    assert int(batch.mask_T.sum()) == sum(sum(each.loss_mask) for each in made), "each sampled token is in one segment"
    batch.old_logprob_T = torch.full((batch.num_tokens,), -1.0)
    rows_R = batch.mask_T.nonzero().flatten()
    for correction in ("sequence_tis", "sequence_mask", "geo_mask", "k3_mask", "opsm"):
        bounds = WIDE | {"k3_mask_high": 0.05, "sequence_mask_low": 0.9, "is_weight_cap": 1.2}
        algo = AlgoSettings(rollout_correction=correction, rollout_correction_level=over, **bounds)
        found = compute_is_weights(
            packing.make_loss_inputs(batch, rows_R, torch.full((len(rows_R),), -1.0), torch.ones(len(rows_R))), algo
        ).tolist()
        expected = []
        for number, each in enumerate(made):
            places = [place for place, sampled in enumerate(each.loss_mask) if sampled]
            log_r = [-1.0 - each.rollout_logprobs[place] for place in places]
            turns = [sum(not sampled for sampled in each.loss_mask[:place]) for place in places]
            expected += textbook_weights(
                algo, log_r=log_r, drift=[-gap for gap in log_r], advantage=[1.0 if number % 2 else -1.0] * len(places),
                sequence=turns if over == "turns" else [0] * len(places),
            )  # fmt: skip
        assert found == pytest.approx(expected, rel=1e-5), correction
        assert len(set(expected)) > 1, correction
