"""The table of algorithms: what may stand together, and what the trainer has to read for it."""

import dataclasses

import pytest

from megatron_rl.algo.algorithms import ALGORITHMS, check_algorithm, needs_old, needs_reference
from megatron_rl.algo.corrections import CORRECTIONS
from megatron_rl.algo.credit import TURN_SCHEMES
from megatron_rl.algo.kl import ESTIMATORS
from megatron_rl.config import AlgoSettings

EPISODES = {"rloo", "opo", "reinforce_pp", "gspo", "gmpo", "ppo", "ppo_turn"}
"""Algorithms whose credit, or whose ratio, is one number an episode; and those whose critic credits turns by itself."""


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_row_goes_with_every_estimator_and_correction(name: str) -> None:
    for estimator in ESTIMATORS:
        for correction in CORRECTIONS:
            algo = AlgoSettings(name=name, kl_estimator=estimator, correction=correction)
            check_algorithm(algo)
            assert algo.turns == "broadcast"


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("scheme", TURN_SCHEMES)
def test_turns_are_refused_where_episodes_are_credited(name: str, scheme: str) -> None:
    assert ALGORITHMS.keys() - EPISODES == {"grpo", "cispo", "sapo", "dppo"}
    algo = AlgoSettings(name=name, turns=scheme)
    if scheme == "broadcast" or name not in EPISODES:
        check_algorithm(algo)
        return
    with pytest.raises(ValueError, match=f"algo.turns={scheme}.*{name} credits whole episodes.*grpo, cispo, sapo, dppo"):
        check_algorithm(algo)


@pytest.mark.parametrize(
    ("field", "value", "choices"),
    [
        ("name", "trpo", "grpo.*dppo"),
        ("turns", "turn_group", "broadcast, outcome_and_turn.*return_to_go"),
        ("kl_estimator", "k4", "k1, k2.*k3"),
        ("correction", "tis", "none.*token_tis"),
    ],
)
def test_a_name_that_is_in_no_table_is_refused_with_the_names_that_are(field: str, value: str, choices: str) -> None:
    with pytest.raises(ValueError, match=f"algo.{field}={value}.*{choices}"):
        check_algorithm(dataclasses.replace(AlgoSettings(), **{field: value}))


def test_what_networks_are_asked() -> None:
    """On-policy with one update nothing is read; several updates need the old logprobs, a KL the reference, a KL in the reward both."""
    plain, kl, in_reward = AlgoSettings(), AlgoSettings(kl_coef=0.1), AlgoSettings(kl_coef=0.1, kl_in_reward=True)
    assert [(needs_old(algo, num_updates=1), needs_old(algo, num_updates=2)) for algo in (plain, kl, in_reward)] == [
        (False, True), (False, True), (True, True),
    ]  # fmt: skip
    assert [needs_reference(algo) for algo in (plain, kl, in_reward)] == [False, True, True]
    assert {name for name, algorithm in ALGORITHMS.items() if algorithm.needs_values} == {"ppo", "ppo_turn"}
    for algorithm in ALGORITHMS.values():
        values = ("values",) if algorithm.needs_values else ()
        assert algorithm.reads(plain) == algorithm.reads(kl) == values
        assert algorithm.reads(in_reward) == ("old_logprobs", "reference_logprobs", *values)
