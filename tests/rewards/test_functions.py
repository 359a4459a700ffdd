"""Tests plain functions as rewards: the arguments they receive, the values they may return, and how
their errors are reported."""

import asyncio
import math

import numpy as np
import pytest

from megatron_rl.errors import InfraError, PermanentInfraError
from megatron_rl.rewards.functions import from_function, wrap_reward_function
from megatron_rl.rewards.rubric import RewardInput, RewardTerm, Rubric
from megatron_rl.types import Turn
from tests.support.rollout_factory import make_reward_input

PAYLOAD = {"question": "Which color?", "answer": "red", "extra": {"level": 3}}
TURNS = [Turn(sequence=0, token_span=(0, 1), text="a look"), Turn(sequence=0, token_span=(2, 3), text="red")]


def scored(function: object, outcome: RewardInput | None = None) -> float | None:
    return asyncio.run(wrap_reward_function("mine", function)(outcome or make_reward_input(*TURNS, payload=PAYLOAD)))


def test_arguments_are_picked_by_name() -> None:
    """A reward function receives the fields that it names as parameters. Defaults apply to other
    parameters."""
    seen = {}

    def every(rollout: object, turns: object, extra: object, answer: object, reply: object, question: object):
        seen.update(rollout=rollout, turns=turns, extra=extra, answer=answer, reply=reply, question=question)
        return 1

    outcome = make_reward_input(*TURNS, payload=PAYLOAD)
    assert scored(every, outcome) == 1.0
    assert seen == {"rollout": outcome.rollout, "turns": TURNS, "reply": "red", **PAYLOAD}
    assert scored(lambda: 0.25) == 0.25
    assert scored(lambda answer=None, scale=4: scale * len(answer)) == 12.0, "a default is for what we do not have"


def test_a_coroutine_is_awaited() -> None:
    async def slow(reply: str, answer: str):
        await asyncio.sleep(0)
        return float(reply == answer)

    assert scored(slow) == 1.0


@pytest.mark.parametrize(("given", "value"), [(True, 1.0), (2, 2.0), (np.float32(0.5), 0.5), (None, None)])
def test_what_counts_as_a_number(given: object, value: float | None) -> None:
    assert scored(lambda: given) == value


@pytest.mark.parametrize("given", [math.nan, math.inf, "1", [1.0], 1j])
def test_what_is_no_number_fails_the_rollout(given: object) -> None:
    """A return value that is not a finite number or None raises PermanentInfraError."""
    with pytest.raises(PermanentInfraError, match=r"^reward mine on e0: returned .* expected a finite number or None$"):
        scored(lambda: given)


def test_an_exception_names_function_line_and_example() -> None:
    def broken(answer: str):
        return {"blue": 1}[answer]

    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(PermanentInfraError, match=rf"^reward mine on e0: KeyError: 'red' \(.*test_functions.py:{line}\)$"):
        scored(broken)
    with pytest.raises(PermanentInfraError, match=r"^reward mine on e0: the task's examples have no 'answer'$"):
        scored(broken, make_reward_input(*TURNS))


def test_our_own_faults_stay_what_they_are() -> None:
    """An InfraError raised within a reward function propagates unchanged."""

    def asks():
        raise InfraError("judge: down")

    with pytest.raises(InfraError, match=r"^judge: down$"):
        scored(asks)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda solution: 0, r"^rewards\['mine'\]=\(solution\): allowed arguments are question, reply, answer, turns, rollout, extra; or "),
        (lambda reply, /: 0, r"^rewards\['mine'\]=\(reply\): allowed arguments"),
        (lambda **columns: 0, r"^rewards\['mine'\]=\(\*\*columns\): allowed arguments"),
        (0.5, r"^rewards\['mine'\]=0.5: is not a function written in Python$"),
        (len, r"^rewards\['mine'\]=<built-in function len>: is not a function written in Python$"),
    ],
)
def test_what_asks_for_something_else_is_refused_at_the_start(function: object, said: str) -> None:
    """A function with unsupported parameters, or no Python function, raises ValueError."""
    with pytest.raises(ValueError, match=said):
        wrap_reward_function("mine", function)


async def right(_: RewardInput) -> float:
    return 0.75


SHIPPED = Rubric(
    terms={"accuracy": RewardTerm(right, weight=2.0)}, vetoes={"empty": lambda outcome: not outcome.turns}, solved_term="accuracy"
)


def total(chosen: str, **own: object) -> tuple[float, dict[str, float], bool]:
    rubric = from_function(chosen, SHIPPED, own)
    outcome = make_reward_input(*TURNS, payload=PAYLOAD)
    score = asyncio.run(rubric.score(outcome))
    outcome.rollout.reward, outcome.rollout.reward_terms = score.reward, score.reward_terms
    return score.reward, score.reward_terms, rubric.is_solved(outcome.rollout)


def test_a_function_is_the_reward_or_a_part_of_it() -> None:
    """A function replaces the rubric's reward or is added to it. The sums are computed by hand."""
    assert total("accuracy", short=lambda: 0.25) == (1.5, {"accuracy": 0.75, "veto empty": 0.0}, True)
    assert total("short", short=lambda: 0.25) == (0.25, {"short": 0.25}, False)
    assert total("short", short=lambda: 0.5) == (0.5, {"short": 0.5}, True), "solved from 0.5 on"
    assert total("accuracy+short", short=lambda: -4) == (-2.5, {"accuracy": 0.75, "short": -4.0, "veto empty": 0.0}, True)
    assert total("short+long", short=lambda: 0.25, long=lambda: 0.5) == (0.75, {"short": 0.25, "long": 0.5}, False)


def test_no_opinion_counts_nothing_unless_nobody_has_one() -> None:
    """A function that returns None does not count. If all functions return None,
    PermanentInfraError is raised."""
    assert total("accuracy+short", short=lambda: None) == (1.5, {"accuracy": 0.75, "veto empty": 0.0}, True)
    assert total("short+long", short=lambda: None, long=lambda: 0.5) == (0.5, {"long": 0.5}, False)
    with pytest.raises(PermanentInfraError, match=r"^rewards short, long: all returned None for e0; at least one must return a number$"):
        total("short+long", short=lambda: None, long=lambda: None)


def test_functions_in_the_form_of_trl() -> None:
    """A function with `completions` gets lists of one: messages, and the columns that it names, or
    all with **kwargs. It returns a list of one.
    """
    seen = {}

    def every(prompts: list, completions: list, **kwargs: list):
        seen.update(prompts=prompts, completions=completions, **kwargs)
        return [0.5]

    assert scored(every) == 0.5
    assert seen == {
        "prompts": [[{"role": "user", "content": "Which color?"}]], "completions": [[{"role": "assistant", "content": "red"}]],
        "question": ["Which color?"], "answer": ["red"], "solution": ["red"], "level": [3],
    }  # fmt: skip
    assert scored(lambda completions, level: [float(level[0])]) == 3.0
    assert scored(lambda completions, missing=None: [None]) is None
    with pytest.raises(PermanentInfraError, match=r"the task's examples have no 'missing'$"):
        scored(lambda completions, missing: [1.0])
    for wrong in ([1.0, 2.0], [], 1.0):
        with pytest.raises(PermanentInfraError, match=r"^reward mine on e0: (ValueError|TypeError): "):
            scored(lambda completions, wrong=wrong: wrong)
