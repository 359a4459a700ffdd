"""Tests the written search for formulas: every statement against brute force over all hands."""

import json
import re
from collections import Counter
from functools import cache
from itertools import combinations

import pytest

from megatron_rl.tasks.gym_cards.expressions import evaluate
from megatron_rl.tasks.gym_cards.points import POINTS24
from megatron_rl.tasks.gym_cards.points_task import held_out_numbers
from megatron_rl.tasks.gym_cards.search import write_search
from megatron_rl.tasks.gym_cards.solvers import find_solution, hand_probabilities
from tests.support.card_games import build_card_task

MOVE = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)((?: \d+)*)(?: ([yn]))?\.")


@cache
def is_reachable(numbers: tuple[int, ...], target: int) -> bool:
    """Return whether integers of at least 0 lead to the target, by trying all ordered pairs."""
    if len(numbers) == 1:
        return numbers[0] == target
    for i, left in enumerate(numbers):
        for j, right in enumerate(numbers):
            values = [] if i == j else [left + right, left * right, *([left - right] if left >= right else [])]
            if i != j and right and not left % right:
                values.append(left // right)
            others = [number for place, number in enumerate(numbers) if place not in (i, j)]
            if any(is_reachable(tuple(sorted([*others, value])), target) for value in values):
                return True
    return False


def check_search(hand: tuple[int, ...], target: int, text: str) -> None:
    """Assert that every move of a text is arithmetic on the numbers before it, and every verdict
    true; the first move judged "y" is the last first move, and the last move is the target."""
    start, moves = text.split(":")
    state = list(map(int, start.split()))
    assert state == sorted(hand, reverse=True)
    judged, rests = [], set()
    found = MOVE.findall(moves)
    assert "".join(f" {a}{sign}{b}={c}{rest}{' ' * bool(verdict)}{verdict}." for a, sign, b, c, rest, verdict in found) == moves
    for a, sign, b, c, listed, verdict in found:
        assert evaluate((a, sign, b)) == int(c)
        rest = Counter(state) - Counter(map(int, (a, b)))
        assert rest.total() == len(state) - 2, "both numbers are there"
        rest = sorted([*rest.elements(), int(c)], reverse=True)
        assert list(map(int, listed.split())) == (rest if len(rest) > 1 else [])
        if verdict:
            judged.append(verdict)
            assert tuple(rest) not in rests and (verdict == "y") == is_reachable(tuple(sorted(rest)), target)
            rests.add(tuple(rest))
        if verdict != "n":
            state = rest
    assert judged == ["n"] * (len(judged) - 1) + ["y"] and state == [target]
    taken = found[len(judged) - 1][1]
    for sign in "/-+*"[: "/-+*".index(taken)]:
        assert rests_of(hand, sign) <= rests, "operators before the one that was taken"


def rests_of(hand: tuple[int, ...], sign: str) -> set[tuple[int, ...]]:
    """Return the numbers after each move with an operator, the larger number first."""
    rests = set()
    for right, left in combinations(sorted(hand), 2):
        value = evaluate((str(left), sign, str(right)))
        if value.denominator == 1:
            rests.add(tuple(sorted([*(Counter(hand) - Counter((left, right))).elements(), int(value)], reverse=True)))
    return rests


@pytest.mark.parametrize("target", [24, 10])
def test_searches_of_all_hands(target: int) -> None:
    found = 0
    for hand in hand_probabilities():
        search = write_search(hand, target)
        assert (search is not None) == is_reachable(hand, target), hand
        if search:
            text, formula = search
            check_search(hand, target, text)
            assert evaluate(formula) == target and sorted(int(token) for token in formula if token.isdigit()) == list(hand)
            assert write_search(hand[::-1], target) == search
            found += 1
    assert found > 400


def test_search_by_hand() -> None:
    text, formula = write_search((2, 10, 4, 7), 24) or ("", ())
    assert text == "10 7 4 2: 10/2=5 7 5 4 n. 4/2=2 10 7 2 y. 7*2=14 14 10. 14+10=24."
    assert formula == ("7", "*", "4", "/", "2", "+", "10")
    assert write_search((3, 3, 8, 8), 24) is None and find_solution((3, 3, 8, 8)), "needs a fraction"


def test_demonstrations_search() -> None:
    """Thoughts are a search and the formula that it finds, which wins a hand of the other split."""
    task = build_card_task("points24", thoughts="search")
    for demonstration in task.demonstrations("correct", num=60, seed=3):
        reply = json.loads(demonstration.messages[1]["content"][0]["text"])
        values = tuple(min({"A": 1, "J": 11, "Q": 12, "K": 13}.get(card) or int(card), 10) for card in reply["cards"])
        text, formula = write_search(values, 24) or ("", ())
        assert reply["thoughts"] == f"{text} {''.join(formula)}=24"
        assert f"{''.join(formula)}=".startswith(reply["current formula"] + reply["action"])
    example = next(each for each in task.examples("eval") if task.gold_replies(each))
    replies = [json.loads(reply) for reply in task.gold_replies(example)]
    assert evaluate([reply["action"] for reply in replies[:-1]]) == POINTS24.target and replies[-1]["action"] == "="
    with pytest.raises(ValueError, match="^sft.splits=biased: "):
        task.demonstrations("biased", num=1, seed=0)


@pytest.mark.parametrize("thoughts", ["formula", "search"])
def test_demonstrations_of_several_targets(thoughts: str) -> None:
    """The formula makes the target that the prompt names, each target occurs, and no hand has
    held-out numbers. Games have the target 24. One target leaves the demonstrations as they are."""
    targets = [10, 24, 36]
    task = build_card_task("points24", thoughts=thoughts, demonstration_targets=targets)
    seen, hands = Counter(), set()
    for demonstration in task.demonstrations("correct", num=200, seed=3):
        prompt, reply = demonstration.messages[0]["content"][1]["text"], demonstration.messages[1]["content"][0]["text"]
        target = int(re.search(r"a formula that makes (\d+) ", prompt).group(1))
        formula, result = json.loads(reply)["thoughts"].split(" ")[-1].split("=")
        assert int(result) == target == evaluate(re.findall(r"\d+|\D", formula))
        seen[target] += 1
        hands.add(tuple(sorted(int(number) for number in re.findall(r"\d+", formula))))
    assert set(seen) == set(targets) and len(hands) > 100
    assert not hands & held_out_numbers(faces_are_ten=True)
    assert {example.payload["target"] for split in ("train", "eval") for example in task.examples(split)} == {24}
    one, same = (build_card_task("points24", thoughts=thoughts, **options) for options in ({}, {"demonstration_targets": [24]}))
    both = [[each.messages[1] for each in task.demonstrations("correct", num=40, seed=3)] for task in (one, same)]
    assert both[0] == both[1]
    for wrong in ([], [0], [24, 101]):
        with pytest.raises(ValueError, match="^task.options.demonstration_targets="):
            build_card_task("points24", demonstration_targets=wrong)
