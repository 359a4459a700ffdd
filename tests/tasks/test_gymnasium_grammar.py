"""Tests the format of actions: what a reply means, what the prompt says, and where names come from."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.tasks.gym_cards.card_action_parser import InvalidAction
from megatron_rl.tasks.gymnasium_envs.action_grammar import ActionGrammar
from megatron_rl.tasks.gymnasium_envs.episode import EpisodeSpec, make_environment, make_grammar
from tests.support.picture_environments import MODULE, SPACES

NAMED = ActionGrammar(low=[2], high=[4], is_integer=True, names=["walk", "rest", "jump"])
NUMBERED = ActionGrammar(low=[0], high=[3], is_integer=True, names=[])
CHOICES = ActionGrammar(low=[0, 5], high=[2, 6], is_integer=True, is_list=True, names=[])
BOX = ActionGrammar(low=[-1.0, 0.0], high=[0.7, 10.0], is_integer=False, is_list=True, names=[])
ONE = ActionGrammar(low=[-3.0], high=[3.0], is_integer=False, is_list=True, names=[])
GRAMMARS = [NAMED, NUMBERED, CHOICES, BOX, ONE]


def grammar_of(name: str, *, actions: list[str] | None = None, **kwargs: object) -> ActionGrammar:
    spec = EpisodeSpec(id=f"{MODULE}:{name}-v0", kwargs=kwargs, image_side=0, actions=actions or [])
    env = make_environment(spec)
    grammar = make_grammar(env, spec)
    env.close()
    return grammar


@pytest.mark.parametrize(
    ("grammar", "action", "expected"),
    [
        (NAMED, '"walk"', [2]), (NAMED, '"jump"', [4]), (NAMED, "2", "no action"), (NAMED, '"Walk"', "no action"),
        (NAMED, '["walk"]', "no action"), (NAMED, "null", "no action"),
        (NUMBERED, "0", [0]), (NUMBERED, "3", [3]), (NUMBERED, "4", "out of bounds"), (NUMBERED, "-1", "out of bounds"),
        (NUMBERED, "1.0", "not a number"), (NUMBERED, "true", "not a number"), (NUMBERED, '"1"', "not a number"),
        (NUMBERED, "[1]", "not a number"), (NUMBERED, "9" * 400, "out of bounds"),
        (CHOICES, "[2, 5]", [2, 5]), (CHOICES, "[2, 4]", "out of bounds"), (CHOICES, "[2]", "wrong number of values"),
        (CHOICES, "[2, 5, 0]", "wrong number of values"), (CHOICES, "2", "wrong number of values"),
        (CHOICES, "[]", "wrong number of values"),
        (BOX, "[0.5, 1]", [0.5, 1.0]), (BOX, "[0.7, 10]", [0.7, 10.0]), (BOX, "[0.71, 1]", "out of bounds"),
        (BOX, "[1e999, 1]", "out of bounds"), (BOX, "[-1, NaN]", "not JSON"), (BOX, "[0, false]", "not a number"),
        (BOX, '{"0": 1, "1": 2}', "wrong number of values"), (ONE, "2", [2.0]), (ONE, "[2]", [2.0]), (ONE, "[[2]]", "not a number"),
    ],
)  # fmt: skip
def test_what_a_reply_means(grammar: ActionGrammar, action: str, expected: object) -> None:
    assert grammar.parse(f'{{"thoughts": "none", "action": {action}}}') == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "not JSON"), ("walk", "not JSON"), ('"walk"', "not an object"), ("{}", "no action"),
        ('{"action": "walk"} {"action": "walk"}', "not JSON"), ('{"action": "walk", "action": "rest"}', "repeated key"),
        ('{"action": "walk"}' + " " * 5000, "too long"), (' \n{"action": "rest"} ', [3]), ("[" * 4000, "not JSON"),
    ],
)  # fmt: skip
def test_a_reply_is_one_object(text: str, expected: object) -> None:
    assert NAMED.parse(text) == expected


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["walk", "rest", "0", ""]),
    lambda inner: st.lists(inner, max_size=3),
)


@settings(max_examples=300, deadline=None)
@given(VALUES, st.sampled_from(GRAMMARS))
def test_a_reply_is_an_action_exactly_if_the_rules_allow_it(value: object, grammar: ActionGrammar) -> None:
    """Random values are compared with the rules in the docstring of the module, in other words: the
    value has the right form, every number has the right type, and none exceeds its bounds.
    """
    action = grammar.parse(json.dumps({"action": value}))
    has_nan = "NaN" in json.dumps(value) or "Infinity" in json.dumps(value)
    if grammar.names:
        expected = [2 + grammar.names.index(value)] if isinstance(value, str) and value in grammar.names else None
    else:
        numbers = value if grammar.is_list and isinstance(value, list) else [value]
        types = (int,) if grammar.is_integer else (int, float)
        fits = len(numbers) == len(grammar.low) and all(type(number) in types for number in numbers)
        fits = fits and all(low <= number <= high for low, number, high in zip(grammar.low, numbers, grammar.high, strict=True))
        expected = numbers if fits else None
    if expected is None or has_nan:
        assert isinstance(action, InvalidAction)
    else:
        assert action == expected and all(math.isfinite(number) for number in action)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=200) | st.text(alphabet='{}[]":,0123456789.-e\\ actionwalk', max_size=60), st.sampled_from(GRAMMARS))
def test_any_text_is_read_without_an_exception(text: str, grammar: ActionGrammar) -> None:
    for reply in (text, f'{{"action": {text}}}', f'{{"action": "{text}"}}'):
        action = grammar.parse(reply)
        assert isinstance(action, InvalidAction) or all(
            low <= number <= high for low, number, high in zip(grammar.low, action, grammar.high, strict=True)
        )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(GRAMMARS))
def test_a_random_action_is_one_that_can_be_written(seed: int, grammar: ActionGrammar) -> None:
    """The written form of a random action is read as the same action, up to the six digits that are
    written. Equal seeds give equal actions.
    """
    action = grammar.sample(random.Random(seed))
    assert action == grammar.sample(random.Random(seed))
    written = json.dumps(grammar.format_action(action)) if grammar.names else grammar.format_action(action)
    assert grammar.parse(f'{{"action": {written}}}') == pytest.approx(action, rel=1e-5, abs=1e-9)


def test_all_actions_are_drawn() -> None:
    rng = random.Random(0)
    assert {tuple(NAMED.sample(rng)) for _ in range(99)} == {(2,), (3,), (4,)}
    assert {tuple(CHOICES.sample(rng)) for _ in range(99)} == {(left, right) for left in (0, 1, 2) for right in (5, 6)}


def test_the_format_in_the_prompt() -> None:
    assert [grammar.describe() for grammar in GRAMMARS] == [
        '"walk", "rest" or "jump"', "integer from 0 to 3", "[integer from 0 to 2, integer from 5 to 6]",
        "[number from -1 to 0.7, number from 0 to 10]", "[number from -3 to 3]",
    ]  # fmt: skip
    assert ActionGrammar(low=[0], high=[0], is_integer=True, names=["go"]).describe() == '"go"'


@pytest.mark.parametrize("name", ["multi_discrete", "box", "square", "integers", "discrete"])
def test_the_bounds_of_a_space(name: str) -> None:
    """The bounds of a grammar are those of gymnasium's space, as the shortest decimals: the bound
    0.7 of float32 is 0.699999988.
    """
    grammar, space = grammar_of("AnySpace", space=name), SPACES[name]
    assert (grammar.low, grammar.high) == {
        "multi_discrete": ([0, 5], [2, 6]), "box": ([-1.0, 0.0], [0.7, 10.0]), "square": ([-1.0] * 4, [1.0] * 4),
        "integers": ([-3], [3]), "discrete": ([0], [3]),
    }[name]  # fmt: skip
    space.seed(0)
    for _ in range(50):
        flat = space.sample().ravel().tolist()
        action = grammar.parse(json.dumps({"action": flat if grammar.is_list else flat[0]}))
        assert action == flat


def test_where_names_come_from() -> None:
    """Names are the given ones, else those of the environment. A wrapper that changes the action
    space takes the names away, because its first action need not be the environment's first.
    """
    assert grammar_of("Walk").names == ["walk", "rest", "jump"] and grammar_of("Walk").low == [2]
    assert grammar_of("Walk", actions=["a", "b", "c"]).names == ["a", "b", "c"]
    assert grammar_of("Meanings").names == ["NOOP", "UP", "DOWN", "FIRE"]
    assert grammar_of("AnySpace").names == [] == grammar_of("TwoActions").names
