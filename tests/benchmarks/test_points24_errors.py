"""Tests benchmarks/points24_errors.py: one planted mistake for each stage, and no mistake."""

import json

import pytest

from benchmarks.points24_errors import find_first_mistake
from megatron_rl.tasks.gym_cards.cards import Card
from tests.support.card_games import build_card_task

CARDS = tuple(map(Card.from_name, ("10H", "4S", "2D", "7C")))
REPLY = {
    "cards": ["10", "4", "2", "7"],
    "current formula": "7*",
    "thoughts": "10 7 4 2: 10/2=5 7 5 4 n. 4/2=2 10 7 2 y. 7*2=14 14 10. 14+10=24. 7*4/2+10=24",
    "action": "4",
}


def change_thoughts(old: str, new: str) -> dict[str, str]:
    assert REPLY["thoughts"].count(old) == 1
    return {"thoughts": REPLY["thoughts"].replace(old, new)}


@pytest.mark.parametrize(
    ("changes", "stage"),
    [
        ({}, "right"),
        ({"thoughts": "7*4/2+10=24"}, "invalid"),
        ({"thoughts": 24}, "invalid"),
        (change_thoughts("n. 4/2", "? 4/2"), "invalid"),
        ({"cards": ["10", "4", "2", "8"]}, "reading"),
        ({"current formula": "7"}, "reading"),
        (change_thoughts("10 7 4 2:", "10 7 4 3:"), "numbers"),
        (change_thoughts("10/2=5 7 5 4", "10/2=4 7 4 4"), "arithmetic"),
        (change_thoughts("7*2=14 14 10", "7*2=14 14 2"), "arithmetic"),
        (change_thoughts("10/2=5 7 5 4", "9/3=3 7 5 4"), "arithmetic"),
        (change_thoughts("7 5 4 n", "7 5 4 y"), "verdict"),
        (change_thoughts("10 7 2 y", "10 7 2 n"), "verdict"),
        (change_thoughts(" 14+10=24.", ""), "verdict"),
        (change_thoughts("7*4/2+10=24", "7*4/2-10=24"), "formula"),
        (change_thoughts("7*4/2+10=24", "7*2+10=24"), "formula"),
        (change_thoughts("7*4/2+10=24", "10+7*4/2=24"), "continuation"),
        ({"action": "2"}, "continuation"),
        ({"action": ""}, "continuation"),
    ],
)
def test_first_mistake_of_a_reply(changes: dict[str, object], stage: str) -> None:
    assert find_first_mistake(CARDS, "7*", json.dumps(REPLY | changes)) == stage


def test_gold_replies_have_no_mistake() -> None:
    task, num = build_card_task("points24", thoughts="search"), 0
    for example in task.examples("eval"):
        cards = tuple(map(Card.from_name, example.payload["cards"]))
        formula = ""
        for reply in task.gold_replies(example):
            assert find_first_mistake(cards, formula, reply) == "right"
            formula += json.loads(reply)["action"]
            num += 1
    assert num > 500
