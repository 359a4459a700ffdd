"""Tests the sums of a rubric against hand-computed numbers."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import InfraError
from megatron_rl.rewards.rubric import (
    CORRECT_THRESHOLD,
    RewardFn,
    RewardInput,
    RewardTerm,
    Rubric,
    TurnRewardTerm,
    cumulative,
    environment_rewards,
)
from megatron_rl.types import Turn
from tests.support.rollout_factory import make_reward_input


def outcome(*rewards: float) -> RewardInput:
    turns = [Turn(sequence=0, token_span=(index, index + 1), text=f"reply {index}", reward=reward) for index, reward in enumerate(rewards)]
    return make_reward_input(*turns)


def gives(value: float) -> RewardFn:
    async def reward(_: RewardInput) -> float:
        return value

    return reward


def steps(*values: float | None):
    async def reward(_: RewardInput) -> list[float | None]:
        return list(values)

    return reward


async def never(_: RewardInput) -> float:
    raise AssertionError("a bonus was asked for that was not earned")


def test_parts_are_weighted_and_reported_bare() -> None:
    """The reward is the weighted sum of the terms. The reported terms have no weight."""
    rubric = Rubric(terms={"accuracy": RewardTerm(gives(1.0), weight=0.8), "format": RewardTerm(gives(-1.0), weight=0.25)})
    score = asyncio.run(rubric.score(outcome(0.0)))
    assert (score.reward, score.outcome_reward) == (pytest.approx(0.55), pytest.approx(0.55))
    assert score.reward_terms == {"accuracy": 1.0, "format": -1.0}
    assert (score.step_scores, score.reward_deltas) == ([None], [0.0]), "without turn parts no turn is a step"


@pytest.mark.parametrize(("accuracy", "expected"), [(0.0, 0.0), (0.4, 0.4), (CORRECT_THRESHOLD, 0.8), (1.0, 1.3)])
def test_a_bonus_is_paid_from_correct_on(accuracy: float, expected: float) -> None:
    """A term with `requires` is computed and paid only if the required term reaches
    CORRECT_THRESHOLD."""
    bonus = gives(3.0) if accuracy >= CORRECT_THRESHOLD else never
    rubric = Rubric(terms={"accuracy": RewardTerm(gives(accuracy)), "code": RewardTerm(bonus, weight=0.1, requires="accuracy")})
    assert asyncio.run(rubric.score(outcome())).reward == pytest.approx(expected)


def test_turn_parts_by_mean_and_by_sum() -> None:
    """Steps 1 and -1 of three turns have weight 0.5. The mean is 1, 1, then 0, so the gains are
    half of 1, 0 and -1. Environment rewards are summed: 2 + 4 + 1.

    The step score of a turn is its whole weighted value, however many turns there are.
    """
    parts = {
        "evidence": TurnRewardTerm(steps(1.0, None, -1.0), weight=0.5),
        "return": TurnRewardTerm(environment_rewards, averages_turns=False),
    }
    score = asyncio.run(Rubric(terms={"accuracy": RewardTerm(gives(1.0))}, turn_terms=parts).score(outcome(2.0, 4.0, 1.0)))
    assert score.step_scores == [0.5 + 2.0, 4.0, -0.5 + 1.0]
    assert score.reward_deltas == [0.5 + 2.0, 4.0, -0.5 + 1.0]
    assert (score.outcome_reward, score.reward) == (1.0, 8.0)
    assert score.reward_terms == {"accuracy": 1.0, "evidence": 0.0, "return": 7.0}


def test_a_turn_gains_what_it_moves_the_mean_by() -> None:
    """Steps 1, 0, none and 1 have weight 2; their mean is 1, 1/2, 1/2, 2/3. A second term, -3 from
    the second turn on, is summed with weight 0.1."""
    parts = {
        "evidence": TurnRewardTerm(steps(1.0, 0.0, None, 1.0), weight=2.0),
        "cost": TurnRewardTerm(steps(None, -3.0, None, None), weight=0.1, averages_turns=False),
    }
    score = asyncio.run(Rubric(turn_terms=parts).score(outcome(0.0, 0.0, 0.0, 0.0)))
    assert score.reward_deltas == pytest.approx([2.0, -1.0 - 0.3, 0.0, 1 / 3], abs=1e-15)
    assert score.step_scores == [2.0, pytest.approx(-0.3), None, 2.0], "a 0 is a step, None is none"
    assert (score.outcome_reward, score.reward) == (0.0, pytest.approx(4 / 3 - 0.3))
    assert cumulative([1.0, None, 0.0], mean=True) == [1.0, 1.0, 0.5]
    assert cumulative([None, 2.0, None, 3.0], mean=False) == [0.0, 2.0, 2.0, 5.0]
    assert cumulative([], mean=True) == []


VALUES = st.one_of(st.none(), st.floats(-3, 3))


@settings(deadline=None)
@given(st.lists(st.tuples(VALUES, VALUES), max_size=8), st.floats(-2, 2), st.floats(0, 2), st.booleans())
def test_outcome_and_gains_are_the_reward_up_to_every_turn(values: list[tuple], accuracy: float, weight: float, vetoed: bool) -> None:
    """The gains up to a turn are what the turn terms would pay if the episode ended there. The
    oracles are textbook means and sums."""
    first, second = ([each[part] for each in values] for part in (0, 1))
    parts = {
        "evidence": TurnRewardTerm(steps(*first), weight=weight),
        "cost": TurnRewardTerm(steps(*second), weight=0.5, averages_turns=False),
    }
    rubric = Rubric(terms={"accuracy": RewardTerm(gives(accuracy))}, turn_terms=parts, vetoes={"held": lambda _: vetoed})
    score = asyncio.run(rubric.score(outcome(*[0.0] * len(values))))

    def worth(given: list[float | None], turn: int) -> list[float]:
        return [min(value, 0.0) if vetoed else value for value in given[: turn + 1] if value is not None]

    for turn in range(len(values)):
        means, sums = worth(first, turn), worth(second, turn)
        expected = weight * sum(means) / max(len(means), 1) + 0.5 * sum(sums)
        assert sum(score.reward_deltas[: turn + 1]) == pytest.approx(expected, abs=1e-12)
    assert score.outcome_reward == (min(accuracy, 0.0) if vetoed else accuracy)
    assert score.outcome_reward + sum(score.reward_deltas) == pytest.approx(score.reward, abs=1e-12)
    assert [turn is None for turn in score.step_scores] == [each == (None, None) for each in values]


def test_without_steps_a_mean_is_nothing() -> None:
    """The mean over no steps is 0."""
    score = asyncio.run(Rubric(turn_terms={"evidence": TurnRewardTerm(steps(None, None))}).score(outcome(0.0, 0.0)))
    assert (score.reward, score.step_scores, score.reward_deltas, score.reward_terms) == (0.0, [None, None], [0.0, 0.0], {"evidence": 0.0})


def test_a_veto_takes_what_is_good_and_leaves_what_is_bad() -> None:
    """A veto removes positive terms and steps and keeps penalties. The mean is still taken over all
    steps."""
    rubric = Rubric(
        terms={
            "accuracy": RewardTerm(gives(1.0)),
            "format": RewardTerm(gives(-1.0), weight=0.2),
            "code": RewardTerm(gives(3.0), requires="accuracy"),
        },
        turn_terms={"evidence": TurnRewardTerm(steps(1.0, -1.0), weight=0.5)},
        vetoes={"long": lambda _: True, "other": lambda _: False},
    )
    score = asyncio.run(rubric.score(outcome(0.0, 0.0)))
    assert score.reward_terms == {"accuracy": 0.0, "format": -1.0, "code": 0.0, "evidence": -0.5, "veto long": 1.0, "veto other": 0.0}
    assert (score.step_scores, score.reward_deltas) == ([0.0, -0.5], [0.0, -0.25])
    assert (score.outcome_reward, score.reward) == (pytest.approx(-0.2), pytest.approx(-0.45))


def test_trouble_is_no_score() -> None:
    """An InfraError of one term propagates instead of a score."""

    async def down(_: RewardInput) -> float:
        raise InfraError("judge: down")

    with pytest.raises(InfraError, match="judge: down"):
        asyncio.run(Rubric(terms={"accuracy": RewardTerm(gives(1.0)), "process": RewardTerm(down)}).score(outcome()))


@pytest.mark.parametrize("values", [(), (1.0,), (1.0, None, 1.0)])
def test_a_turn_part_gives_one_value_a_turn(values: tuple[float | None, ...]) -> None:
    with pytest.raises(ValueError, match=f"evidence returned {len(values)} values for 2 turns"):
        asyncio.run(Rubric(turn_terms={"evidence": TurnRewardTerm(steps(*values))}).score(outcome(0.0, 0.0)))


@pytest.mark.parametrize(
    ("rubric", "message"),
    [
        (lambda: Rubric(terms={"a": RewardTerm(gives(1.0))}, turn_terms={"a": TurnRewardTerm(environment_rewards)}), "occurs twice"),
        (lambda: Rubric(terms={"veto a": RewardTerm(gives(1.0))}, vetoes={"a": lambda _: True}), "occurs twice"),
        (lambda: Rubric(terms={"a": RewardTerm(gives(1.0), requires="b")}), "requires 'b'"),
        (
            lambda: Rubric(terms={"a": RewardTerm(gives(1.0)), "b": RewardTerm(never, requires="a"), "c": RewardTerm(never, requires="b")}),
            "itself requires another term",
        ),
    ],
)
def test_rubrics_that_make_no_sense(rubric, message: str) -> None:  # noqa: ANN001
    with pytest.raises(ValueError, match=message):
        rubric()


def test_parts_are_asked_at_once() -> None:
    """Reward terms run concurrently. The two terms here wait for each other and would never finish
    one after the other."""

    async def main() -> float:
        one, two = asyncio.Event(), asyncio.Event()

        async def first(_: RewardInput) -> float:
            one.set()
            await two.wait()
            return 1.0

        async def second(_: RewardInput) -> list[float | None]:
            two.set()
            await one.wait()
            return [1.0]

        rubric = Rubric(terms={"first": RewardTerm(first)}, turn_terms={"second": TurnRewardTerm(second)})
        return (await asyncio.wait_for(rubric.score(outcome(0.0)), 10)).reward

    assert asyncio.run(main()) == 2.0
