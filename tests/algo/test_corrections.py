"""Corrections for an engine that gives tokens other probabilities, against hand numbers."""

import math

import pytest
import torch

from megatron_rl.algo.algorithms import ALGORITHMS
from megatron_rl.algo.corrections import CORRECTIONS, none, token_tis
from megatron_rl.algo.objective import objective
from megatron_rl.config import AlgoSettings
from megatron_rl.types import Rows
from tests.support.rows import make_rows, random_rows

TIS = AlgoSettings(correction="token_tis", correction_cap=2.0)


def rows_of(*gaps: float, dtype: torch.dtype = torch.float64) -> Rows:
    """On-policy rows whose old logprob, -1, is this much above the engine's."""
    return make_rows([0.0] * len(gaps), [1.0] * len(gaps), old=[-1.0] * len(gaps), engine=[-1.0 - gap for gap in gaps], dtype=dtype)


def test_token_tis_by_hand() -> None:
    """rho = 3 is truncated at 2; 1.5 and 1/3 are what they are, and nothing is truncated below."""
    weights = token_tis(rows_of(math.log(3), math.log(1.5), -math.log(3), 0.0), TIS)
    assert weights.tolist() == pytest.approx([2.0, 1.5, 1 / 3, 1.0], abs=1e-14)
    wide = AlgoSettings(correction="token_tis", correction_cap=5.0)
    assert token_tis(rows_of(math.log(3)), wide).tolist() == pytest.approx([3.0], abs=1e-14)
    assert none(rows_of(math.log(3), -2.0), TIS).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("gap", [1000.0, 89.0, -1000.0, math.inf, -math.inf])
def test_weights_stay_finite_in_float32(gap: float) -> None:
    (weight,) = token_tis(rows_of(gap, dtype=torch.float32), TIS).tolist()
    assert weight == (2.0 if gap > 0 else 0.0)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_where_engine_and_trainer_agree_nothing_is_corrected(name: str) -> None:
    """Bit for bit, loss and gradient."""
    results = []
    for correction in CORRECTIONS:
        rows = random_rows(3, [4, 1, 7])
        rows.engine_R.copy_(rows.old_R)
        loss, metrics = objective(AlgoSettings(name=name, correction=correction, kl_coef=0.1, entropy_coef=0.01))(rows)
        results.append((loss.item(), torch.autograd.grad(loss, rows.logprob_R)[0].tolist()))
        assert ("engine/correction" in metrics.sums) == (correction != "none")
    assert len(results) == 2 and results[0] == results[1]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_weights_multiply_the_surrogate_alone_and_are_constants(name: str) -> None:
    """Loss, gradient and metric with c = log 3 (weight 2) on the first context and c = log 1.5 on the second, term by term."""
    lengths, weights = [3, 4], torch.tensor([2.0] * 3 + [1.5] * 4, dtype=torch.float64)
    rows = random_rows(4, lengths)
    rows.engine_R.copy_(rows.old_R - torch.tensor([math.log(3)] * 3 + [math.log(1.5)] * 4, dtype=torch.float64))
    algo = AlgoSettings(name=name, correction="token_tis", kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01)
    loss, metrics = objective(algo)(rows)
    kl_R, entropy_R = (rows.logprob_R - rows.reference_R) ** 2 / 2, rows.entropy_R
    expected = (rows.weight_R * (weights * ALGORITHMS[name].surrogate(rows, algo) + 0.1 * kl_R - 0.01 * entropy_R)).sum()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    leaves = (rows.logprob_R, rows.entropy_R)
    for given, other in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(given, other, rtol=1e-12, atol=1e-12)
    assert metrics.sums["engine/correction"].item() == pytest.approx(3 * 2.0 + 4 * 1.5, abs=1e-12)


def test_on_policy_the_weight_is_that_of_the_current_policy_and_has_no_gradient() -> None:
    """Where a step makes one update the old logprob is the current one, detached: gradient -min(rho, 2) A."""
    logprob_R = torch.tensor([-1.0, -1.0], dtype=torch.float64).requires_grad_()
    given = make_rows([0.0, 0.0], [1.0, -1.0], engine=[-1.0 - math.log(1.5), -1.0 - math.log(3)])
    rows = Rows(
        logprob_R=logprob_R, old_R=logprob_R.detach(), entropy_R=given.entropy_R, engine_R=given.engine_R, reference_R=None,
        advantage_R=given.advantage_R, weight_R=given.weight_R, segment_R=given.segment_R, turn_R=given.turn_R,
    )  # fmt: skip
    loss, _ = objective(TIS)(rows)
    loss.backward()
    assert logprob_R.grad.tolist() == pytest.approx([-1.5, 2.0], abs=1e-14)
