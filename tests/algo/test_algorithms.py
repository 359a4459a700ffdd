"""Compatibility of algorithm settings, and the model outputs that each algorithm requires."""

import dataclasses
import math
from types import SimpleNamespace

import pytest

from megatron_rl.algo.advantages import TURN_SCHEMES
from megatron_rl.algo.algorithms import ALGORITHMS, check_algorithm, needs_old_logprob_forward, needs_reference
from megatron_rl.algo.kl import ESTIMATORS
from megatron_rl.algo.rollout_correction import CORRECTIONS
from megatron_rl.config import AlgoSettings, BatchSettings, DistillSettings

EPISODES = {"rloo", "opo", "reinforce_pp", "gspo", "gmpo", "ppo", "ppo_turn", "distill"}
"""Algorithms with one advantage or one ratio per episode, with a critic that values turns, or with
no advantages."""


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_row_goes_with_every_estimator_and_correction(name: str) -> None:
    """Every algorithm is accepted with every KL estimator and every rollout correction."""
    for estimator in ESTIMATORS:
        for correction in CORRECTIONS:
            algo = AlgoSettings(name=name, kl_estimator=estimator, rollout_correction=correction)
            check_algorithm(algo)
            assert algo.turn_credit == "broadcast"


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("scheme", TURN_SCHEMES)
def test_turns_are_refused_where_episodes_are_credited(name: str, scheme: str) -> None:
    """Algorithms with one advantage per episode reject every turn_credit except broadcast, and the
    error lists the algorithms that support it."""
    assert ALGORITHMS.keys() - EPISODES == {"grpo", "cispo", "sapo", "dppo"}
    algo = AlgoSettings(name=name, turn_credit=scheme)
    if scheme == "broadcast" or name not in EPISODES:
        check_algorithm(algo)
        return
    with pytest.raises(ValueError, match=f"algo.turn_credit={scheme}.*{name} assigns one advantage per episode.*grpo, cispo, sapo, dppo"):
        check_algorithm(algo)


@pytest.mark.parametrize(
    ("field", "value", "choices"),
    [
        ("name", "trpo", "grpo.*dppo"),
        ("turn_credit", "turn_group", "broadcast, outcome_and_turn.*return_to_go"),
        ("kl_estimator", "k4", "k1, k2.*k3"),
        ("rollout_correction", "tis", "none.*token_tis.*opsm"),
    ],
)
def test_a_name_that_is_in_no_table_is_refused_with_the_names_that_are(field: str, value: str, choices: str) -> None:
    """An unknown name is rejected with an error that lists the known names."""
    with pytest.raises(ValueError, match=f"algo.{field}={value}.*{choices}"):
        check_algorithm(dataclasses.replace(AlgoSettings(), **{field: value}))


RATIOS = ("bypass", "token_tis", "sequence_tis", "token_mask", "sequence_mask")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"rollout_correction": "tis"},
            "algo.rollout_correction=tis: choose one of none, bypass, token_tis, sequence_tis, token_mask, .*opsm",
        ),
        ({"rollout_correction": ""}, "algo.rollout_correction=: choose one of none"),
        ({"rollout_correction": "token_tis+"}, "algo.rollout_correction=: choose one of none"),
        ({"rollout_correction": "token_tis, geo_mask"}, "algo.rollout_correction=token_tis, geo_mask: choose one of none"),
        (
            {"rollout_correction": "opsm+geo_mask+opsm"},
            r"algo.rollout_correction=opsm\+geo_mask\+opsm: contains a duplicate name; list each correction once",
        ),
        (
            {"rollout_correction": "none+opsm"},
            r"algo.rollout_correction=none\+opsm: 'none' cannot be combined with other corrections; remove 'none'",
        ),
        (
            {"rollout_correction": "token_tis+bypass"},
            r".*=token_tis\+bypass: token_tis and bypass would each apply the importance ratio; keep one",
        ),
        (
            {"rollout_correction_level": "turns"},
            "algo.rollout_correction_level=turns: algo.rollout_correction=none contains no sequence-level correction; use sequences",
        ),
        (
            {"rollout_correction_level": "turns", "rollout_correction": "bypass"},
            "algo.rollout_correction_level=turns: algo.rollout_correction=bypass contains no sequence-level correction",
        ),
        ({"rollout_correction_level": "episodes"}, "algo.rollout_correction_level=episodes: choose one of sequences, turns"),
        ({"is_weight_cap": 0.0}, "algo.is_weight_cap=0.0: must be positive"),
        ({"token_mask_low": 1.5}, r"algo.token_mask_low=1.5: must be in \[0, 1\], so that r = 1 is never masked"),
        ({"sequence_mask_low": -0.5}, r"algo.sequence_mask_low=-0.5: must be in \[0, 1\]"),
        ({"geo_mask_low": math.nan}, "algo.geo_mask_low=nan: must be in"),
        ({"token_mask_high": 0.9}, "algo.token_mask_high=0.9: must be at least 1"),
        ({"sequence_mask_high": 0.9}, "algo.sequence_mask_high=0.9: must be at least 1"),
        ({"geo_mask_high": 0.9}, "algo.geo_mask_high=0.9: must be at least 1"),
        ({"k3_mask_high": -1.0}, "algo.k3_mask_high=-1.0: must not be negative"),
        ({"opsm_delta": -0.1}, "algo.opsm_delta=-0.1: must not be negative"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(given: dict, line: str) -> None:
    """Contradictory or out-of-range correction settings are rejected with a one-line error."""
    with pytest.raises(ValueError, match=f"^{line}") as told:
        check_algorithm(AlgoSettings(**given))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("one", CORRECTIONS)
@pytest.mark.parametrize("other", CORRECTIONS)
def test_which_rows_go_together(one: str, other: str) -> None:
    """Two corrections combine unless they are equal, one is `none`, or both use the importance
    ratio."""
    algo = AlgoSettings(rollout_correction=f"{one}+{other}")
    if one == other or "none" in (one, other) or {one, other} <= set(RATIOS):
        with pytest.raises(ValueError, match=r"^algo.rollout_correction="):
            check_algorithm(algo)
    else:
        check_algorithm(algo)


def test_what_networks_are_asked() -> None:
    """The required forward passes and columns depend on the number of updates and on the KL
    settings. On-policy training with one update needs no old logprobs; several updates do. A KL in
    the loss needs the reference model; a KL in the reward needs old and reference logprobs."""
    plain, kl, in_reward = AlgoSettings(), AlgoSettings(kl_coef=0.1), AlgoSettings(kl_coef=0.1, use_kl_in_reward=True)

    def needs(algo: AlgoSettings, *, distill: DistillSettings = DistillSettings()) -> list[bool]:
        return [
            needs_old_logprob_forward(SimpleNamespace(algo=algo, distill=distill, batch=BatchSettings(epochs=epochs))) for epochs in (1, 2)
        ]

    found = [tuple(needs(algo)) for algo in (plain, kl, in_reward)]
    assert found == [(False, True), (False, True), (True, True)]
    bypassed = [dataclasses.replace(algo, rollout_correction="geo_mask+bypass") for algo in (plain, kl, in_reward)]
    assert not any(any(needs(algo)) for algo in bypassed)
    rewarding, in_loss = (DistillSettings(teacher="t", apply_to=where) for where in ("reward", "loss"))
    assert [needs(plain, distill=each) for each in (rewarding, in_loss)] == [[True, True], [False, True]]
    assert [needs_reference(algo) for algo in (plain, kl, in_reward)] == [False, True, True]
    assert {name for name, algorithm in ALGORITHMS.items() if algorithm.needs_critic} == {"ppo", "ppo_turn"}
    for algorithm in ALGORITHMS.values():
        values = ("values",) if algorithm.needs_critic else ()
        assert algorithm.required_columns(plain) == algorithm.required_columns(kl) == values
        assert algorithm.required_columns(in_reward) == ("old_logprobs", "reference_logprobs", *values)
