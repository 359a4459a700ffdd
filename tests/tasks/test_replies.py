"""Tests the reading of an action from a response: every text yields one action or a counted invalid
response, quickly, and is never executed."""

import ast
import asyncio
import builtins
import json
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.tasks import gym_cards
from megatron_rl.tasks.gym_cards.card_action_parser import ACTION_PARSERS, InvalidAction, parse_json_action, parse_named_action
from megatron_rl.tasks.gym_cards.number_line import ACTIONS as STEPS
from megatron_rl.tasks.gym_cards.points import EZPOINTS, POINTS24
from tests.support.card_games import build_card_task

MOVES = ("stand", "hit")
GAMES = {"number_line": STEPS, "ez_points": EZPOINTS.tokens, "points24": POINTS24.tokens, "blackjack": MOVES}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"thoughts": "2 or 3", "action": "10"}', "10"), ("I append 10", "10"), ("1", "1"), ('"action": "1 0"', "1"),
        ("12", InvalidAction.NO_ACTION), ("", InvalidAction.NO_ACTION), ("2 3", InvalidAction.SEVERAL_ACTIONS), ("2, that is 2", "2"),
        ('{"ACTION": "="}', "="), ("110", InvalidAction.NO_ACTION), ("10 or 1", InvalidAction.SEVERAL_ACTIONS), ('"action": "',
        InvalidAction.NO_ACTION),
        ('"action": "+", no: "*"', InvalidAction.SEVERAL_ACTIONS), ("\uff11", InvalidAction.NO_ACTION), ("\u0661", InvalidAction.NO_ACTION),
        ("1\u0660", InvalidAction.NO_ACTION), ("1\u00b2", InvalidAction.NO_ACTION), ("1st", InvalidAction.NO_ACTION), ("x_1",
        InvalidAction.NO_ACTION),
        ("__import__('os')", InvalidAction.NO_ACTION), ("+" * 5000, InvalidAction.TOO_LONG), ('"action": "action 4"', "4"),
    ],
)  # fmt: skip
def test_the_reading_of_rl4vlm(text: str, expected: str) -> None:
    read = parse_named_action(text, EZPOINTS.tokens)
    assert (read if isinstance(read, InvalidAction) else EZPOINTS.tokens[read]) == expected


def test_words_are_whole_ones_in_any_case() -> None:
    assert parse_named_action("On white ground, understand: Hit!", MOVES) == 1
    assert parse_named_action("stand or hit", MOVES) is InvalidAction.SEVERAL_ACTIONS
    assert parse_named_action('{"thoughts": "not hit", "action": "STAND"}', MOVES) == 0
    assert (
        parse_json_action('{"action": "1"}', EZPOINTS.tokens) == 0
        and parse_json_action('{"action": 1}', EZPOINTS.tokens) is InvalidAction.NO_ACTION
    )


NAMES = ["__import__('os').system('exit 1')", "().__class__.__mro__", "exec", "lambda: 0", "os", "None", "1/0", "NaN", "10**10**10"]
MARKS = ["action", '"action": ', '"', ":", " ", "{", "}", "[", ",", "\\", "\x00", "\u0130"]
PIECES = st.sampled_from([*POINTS24.tokens, *MOVES, *MARKS, *NAMES])
DEEP = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([*POINTS24.tokens, *MOVES]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["action", "thoughts", "a"]), inner, max_size=3),
    max_leaves=8,
)
REPLIES = st.text(max_size=60) | st.lists(PIECES, max_size=30).map("".join) | DEEP.map(json.dumps)


def named_by_hand(text: str, actions: tuple[str, ...]) -> set[str]:
    """Return the actions that the rl4vlm reading may find, by a loop over the characters. A run of
    letters, digits and _ is one word, and so is any other single character."""
    lower = text.lower()
    place = lower.find('"action"')
    words, run = [], ""
    for character in lower[place + len('"action"') if place >= 0 else 0 :] + " ":
        if character.isalnum() or character == "_":
            run += character
        else:
            words += [run, character]
            run = ""
    return {*words} & {*actions}


@settings(max_examples=400, deadline=None)
@given(REPLIES, st.sampled_from(list(GAMES)))
def test_a_reply_is_one_action_or_an_invalid_one(text: str, game: str) -> None:
    """Both readings agree with a second implementation: plain loops for rl4vlm, and msgspec's
    decoder for JSON, which accepts repeated keys."""
    actions = GAMES[game]
    named = named_by_hand(text, actions)
    read = parse_named_action(text, actions)
    assert read == (actions.index(*named) if len(named) == 1 else InvalidAction.SEVERAL_ACTIONS if named else InvalidAction.NO_ACTION)
    found = parse_json_action(text, actions)
    try:
        other = msgspec.json.decode(text)
    except msgspec.DecodeError:
        assert isinstance(found, InvalidAction)
    else:
        meant = other.get("action") if isinstance(other, dict) else None
        assert (
            (actions[found] == meant)
            if not isinstance(found, InvalidAction)
            else (meant not in actions or found is InvalidAction.REPEATED_KEY)
        )


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(list(GAMES)), st.data())
def test_an_action_in_an_object_is_read(game: str, data: st.DataObject) -> None:
    """Both readings find the action of a JSON object, whatever the object contains before it."""
    action = data.draw(st.sampled_from(GAMES[game]))
    others = data.draw(st.dictionaries(st.sampled_from(["thoughts", "cards", "current formula"]), st.text(max_size=40) | st.integers()))
    text = json.dumps({**others, "action": action})
    assert [GAMES[game][read(text, GAMES[game])] for read in ACTION_PARSERS.values()] == [action] * 2 or '"action"' in text[:-20].lower()


HUGE = {
    "nothing": "", "blanks": " " * 5000, "brackets": "[" * 4096, "objects": '{"a":' * 800, "parentheses": "(" * 10_000 + "1" + ")" * 10_000,
    "a long number": '{"action": ' + "9" * 4000 + "}", "many keys": "{" + ",".join(f'"{number}":1' for number in range(500)) + "}",
    "a long text": "1 " * 2000, "one word": "a" * 4096, "marks": "+-*/()=" * 500, "quotes": '"action"' * 500, "a megabyte": "x" * 1_000_000,
    "escapes": '{"action": "' + "\\u0031" * 600 + '"}', "expression": "1/0", "surrogate": "\ud800", "zeros": "\x00" * 4096,
}  # fmt: skip


@pytest.mark.parametrize("reading", ACTION_PARSERS)
@pytest.mark.parametrize("kind", HUGE)
def test_no_reply_takes_long(kind: str, reading: str) -> None:
    """Reading a response takes less than 2000 microseconds of CPU time, as the best of five tries.
    On the machine where this was written, the worst response took 430 and a valid one 4."""
    text, took = HUGE[kind], []
    for _ in range(5):
        began = time.thread_time()
        read = ACTION_PARSERS[reading](text, POINTS24.tokens)
        took.append(time.thread_time() - began)
    assert isinstance(read, InvalidAction) or (reading, kind) == ("rl4vlm", "a long text")
    assert min(took) < 2e-3, f"{min(took) * 1e6:.0f} us"


@pytest.mark.parametrize("name", GAMES)
def test_whatever_is_replied_is_played_or_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every response is played or counted as invalid, in whole episodes with every reading and
    every way to handle invalid responses. None leads to a call of eval, exec or compile."""
    told = []
    replies = [*HUGE.values(), *NAMES, *(f'{{"action": "{word}"}}' for word in (*NAMES, *GAMES[name])), *GAMES[name]]
    invalids = ("penalize", "repeat", "random", *(("noop",) if name in ("ez_points", "points24") else ()))

    async def episodes(reading: str, invalid: str) -> None:
        task = build_card_task(name, reading=reading, invalid=invalid)
        example = task.examples("train")[0]
        for text in replies:
            env = task.env(example)
            await env.reset(0)
            step = await env.step(text)
            read = ACTION_PARSERS[reading](text, GAMES[name])
            assert (step.tool_call.ran, step.tool_call.error) == ((True, "") if not isinstance(read, InvalidAction) else (False, str(read)))
            assert step.tool_call.source == (text if isinstance(read, InvalidAction) else GAMES[name][read])

    with monkeypatch.context() as watched:
        for function in ("eval", "exec", "compile"):
            watched.setattr(builtins, function, lambda *given, **options: told.append(given))
        for reading in ACTION_PARSERS:
            for invalid in invalids:
                asyncio.run(episodes(reading, invalid))
    assert not told


def test_the_games_have_no_word_that_runs_code() -> None:
    """The source of the games uses none of eval, exec, compile and __import__."""
    for path in Path(gym_cards.__path__[0]).glob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        assert not names & {"eval", "exec", "compile", "__import__"}, path
