"""Tests the evaluations of the card games: what they play, and their metrics against published
figures and simulated games."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
from PIL import Image

from megatron_rl.rollout.task import Task
from megatron_rl.tasks.gym_cards import blackjack, points
from megatron_rl.tasks.gym_cards.blackjack import BlackjackState, hand_total
from megatron_rl.tasks.gym_cards.blackjack_table import POSITIONS, Position, best_policy
from megatron_rl.tasks.gym_cards.cards import Card
from megatron_rl.tasks.gym_cards.number_line import NumberLine
from megatron_rl.tasks.gym_cards.points import EZPOINTS, POINTS24, PointsState
from megatron_rl.tasks.gym_cards.solvers import find_solution
from megatron_rl.types import Example, Rollout, ToolCall, Turn
from tests.support.card_games import build_card_task, image_and_text, play_replies


def test_blackjack_is_asked_in_every_position() -> None:
    """The evaluation covers every position, with hands that can occur in a game and drawings that
    no training start has. An evaluation with more hands begins with those of one with fewer."""
    few, more = build_card_task("blackjack", eval_drawings=2), build_card_task("blackjack", eval_drawings=5)
    by_id = {example.id: example for example in more.examples("eval")}
    assert len(few.examples("eval")) == 560 and all(by_id[example.id] == example for example in few.examples("eval"))
    trained = {(each.payload["dealer"], *each.payload["player"]) for each in few.examples("train")}
    asked, lengths = [], set()
    for example in more.examples("eval"):
        player, up = [Card.from_name(name) for name in example.payload["player"]], Card.from_name(example.payload["dealer"])
        assert example.payload["position"] == (*hand_total(player), up.value) and hand_total(player[:-1])[0] <= 21
        assert (str(up), *map(str, player[:2])) not in trained and not {10} & {card.rank for card in (up, *player)}
        asked.append(example.payload["position"])
        lengths.add(len(player))
    assert asked == [position for position in POSITIONS for _ in range(5)] and {2, 3, 4, 5} <= lengths
    (step,) = play_replies(more, more.examples("eval")[0], ['{"action": "hit"}'])
    assert (step.done, step.reward, step.tool_call.source) == (True, 0.0, "hit"), "nothing is played"


def answered(task: Task, answer: Callable[[Position, int], str]) -> list[Rollout]:
    """Return the rollouts of an evaluation. `answer` maps a position and the number of a hand to
    the response."""
    rollouts = []
    for group, example in enumerate(task.examples("eval")):
        position, number = example.payload["position"], int(example.id.rpartition("_")[2])
        (step,) = play_replies(task, example, [answer(position, number)])
        turn = Turn(sequence=0, token_span=(0, 1), text="", tool_call=step.tool_call)
        rollouts.append(Rollout(task="blackjack", example_id=example.id, group=group, sample_index=0, turns=[turn], reward=0.0))
    return rollouts


def test_blackjacks_figures_are_those_of_games_played_with_its_answers() -> None:
    """The metrics of the best policy are the published ones. A policy with different answers for
    two hands of a position and invalid ones at 20 agrees within 3.9 standard errors with 20,000
    games of gymnasium's own environment."""
    best, task = best_policy(), build_card_task("blackjack", eval_drawings=2)
    examples = task.examples("eval")
    figures = task.extra_metrics(examples, answered(task, lambda position, _: json.dumps({"action": ("stand", "hit")[best[position]]})))
    assert figures == pytest.approx({"invalid": 0.0, "success": 0.4295, "draws": 0.0945, "return": -0.0466}, abs=5e-5)
    stand, hit = '{"action": "stand"}', '{"action": "hit"}'
    mixed = answered(task, lambda position, number: "?" if position[0] == 20 else hit if number or position[0] < 12 else stand)
    figures = task.extra_metrics(examples, mixed)
    assert figures["invalid"] == pytest.approx(20 / 280)
    game, rewards, dice = gymnasium.make("Blackjack-v1", sab=False).unwrapped, [], random.Random(3)
    game.reset(seed=11)
    for _ in range(20_000):
        (points, _, _), _ = game.reset()
        reward, over = 0.0, False
        while not over and points != 20:
            (points, _, _), reward, over, _, _ = game.step(1 if points < 12 else dice.randrange(2))
        rewards.append(reward if over else -1.0)
    num = len(rewards)
    for name, share in (("success", np.mean(np.array(rewards) > 0)), ("draws", np.mean(np.array(rewards) == 0))):
        assert abs(share - figures[name]) < 3.9 * (figures[name] * (1 - figures[name]) / num) ** 0.5, name
    assert abs(np.mean(rewards) - figures["return"]) < 3.9 * np.std(rewards) / num**0.5
    silence = Turn(sequence=0, token_span=(0, 1), text="", tool_call=ToolCall(tool="move", source="hit", ran=False))
    silent = [replace(rollout, turns=[silence]) for rollout in mixed]
    assert task.extra_metrics(examples, silent) == {"invalid": 1.0, "success": 0.0, "draws": 0.0, "return": pytest.approx(-1.0)}
    assert task.extra_metrics(examples, mixed[:1])["return"] == pytest.approx(-1.0, abs=1e-3), "a position that nobody answered is given up"


DRAWN = {1: 1 / 13, **{value: 1 / 13 for value in range(2, 10)}, 10: 4 / 13}


def ends_at_21(points: int = 0, *, has_ace: bool = False) -> float:
    """Return the probability that a dealer with these cards, drawing from DRAWN until 17, ends at
    21."""
    total = points + 10 * (has_ace and points <= 11)
    if total >= 17:
        return float(total == 21)
    return sum(share * ends_at_21(points + value, has_ace=has_ace or value == 1) for value, share in DRAWN.items())


def test_blackjacks_rules_are_those_of_its_evaluation() -> None:
    """The evaluation uses the rules of the task. The values are hand-computed for a policy that
    always stands. A natural (8 of 169 hands) earns half a stake more if the dealer has no 21. With
    sab, it also wins a stake against a 21 that is no natural."""
    found = {}
    for rules in ({}, {"natural": True}, {"sab": True}):
        task = build_card_task("blackjack", **rules)
        stands = ToolCall(tool="move", source="stand")
        turn = Turn(sequence=0, token_span=(0, 1), text="", tool_call=stands)
        rollouts = [
            Rollout(task="blackjack", example_id=example.id, group=group, sample_index=0, turns=[turn], reward=0.0)
            for group, example in enumerate(task.examples("eval"))
        ]
        found[next(iter(rules), "")] = task.extra_metrics(task.examples("eval"), rollouts)
    chance, at_21 = 8 / 169, ends_at_21()
    assert found["natural"]["return"] - found[""]["return"] == pytest.approx(0.5 * chance * (1 - at_21), abs=1e-12)
    assert found["natural"]["success"] == found[""]["success"]
    for name, more in (("return", 1), ("success", 1), ("draws", -1)):
        assert found["sab"][name] - found[""][name] == pytest.approx(more * chance * (at_21 - chance), abs=1e-12), name


@pytest.mark.parametrize("thoughts", ["formula", "search"])
def test_points24_says_how_many_of_the_solvable_are_solved(thoughts: str) -> None:
    """The metric is the solved share of the solvable hands, with or without a search for them.
    Evaluations read formulas strictly even if training does not: an adjacent 2 and 4 are not a
    24."""
    task = build_card_task("points24", legacy_rules=True, thoughts=thoughts, eval_hands=300)
    examples = task.examples("eval")
    won = [
        Rollout(task="points24", example_id=each.id, group=number, sample_index=0, reward=10.0 * (number % 3 == 0))
        for number, each in enumerate(examples)
    ]
    could = [
        number for number, each in enumerate(examples) if find_solution(tuple(Card.from_name(card).value for card in each.payload["cards"]))
    ]
    assert 150 < len(could) < 300
    share = sum(number % 3 == 0 for number in could) / len(could)
    assert task.extra_metrics(examples, won) == {"invalid": 0.0, "success_of_solvable": pytest.approx(share)}
    hand = {"cards": ["2H", "4S", "AD", "AC"], "look": ("large", 1.0), "target": 24}
    replies = [json.dumps({"action": token}) for token in ["2", "4", "*", "1", "*", "1", "="]]
    for split, earned in (("train", 10.0), ("eval", -1.0)):
        example = Example(id="", payload={**task.examples(split)[0].payload, **hand})
        assert play_replies(task, example, replies)[-1].reward == earned


def test_evaluations_may_look_otherwise_and_training_does_not() -> None:
    """Options of the evaluation change its images, numbers and turns, but not the examples of
    training."""
    for name in ("ez_points", "points24", "blackjack"):
        plain, other = build_card_task(name), build_card_task(name, eval_art="night", eval_card_scale=0.5)
        assert plain.examples("train") == other.examples("train")
        one, two = plain.examples("eval")[0], other.examples("eval")[0]
        assert one.id == two.id
        seen = []
        for task, example in ((plain, one), (other, two)):
            (first,) = asyncio.run(task.env(example).reset(0))
            seen.append(np.array(first["content"][0]["image"]))
        assert (seen[0] != seen[1]).any(-1).mean() > 0.02
    line = build_card_task("number_line", eval_max_number=9)
    assert line.examples("train") == build_card_task("number_line").examples("eval") and len(line.examples("eval")) == 90 - 30
    for example in line.examples("eval"):
        current, target = example.payload["current"], example.payload["target"]
        assert max(current, target) > 5
        if abs(current - target) <= 7:
            assert [step.reward for step in play_replies(line, example, line.gold_replies(example))][-1] == 1.0
    game = NumberLine(max_number=9)
    game.reset(options={"current": 9, "target": 0})
    assert [game.step(1)[3] for _ in range(18)] == [False] * 17 + [True]


STYLES = [(art, scale) for art in ("classic", "night") for scale in (0.5, 0.8)]


def find_style(name: str, image: Image.Image, cards: list[str], formula: str) -> tuple[str, float]:
    """Return the only one of STYLES in which the drawing of a state equals an image."""
    hand = tuple(map(Card.from_name, cards))
    if name == "blackjack":
        drawings = [blackjack.draw_state(BlackjackState(hand[1:], hand[:1]), style) for style in STYLES]
    else:
        rules = EZPOINTS if name == "ez_points" else POINTS24
        drawings = [points.draw_state(rules, PointsState(hand, (formula,) if formula else ()), style) for style in STYLES]
    (place,) = [place for place, drawing in enumerate(drawings) if drawing.tobytes() == image.tobytes()]
    return STYLES[place]


@pytest.mark.parametrize("name", ["ez_points", "points24", "blackjack"])
def test_training_draws_cards_in_the_listed_styles(name: str) -> None:
    """Each training hand has one of the listed styles in all of its turns, and all styles occur.
    Demonstrations have other images, but the same responses. Evaluations do not change."""
    plain, varied = build_card_task(name), build_card_task(name, train_arts=["classic", "night"], train_card_scales=[0.5, 0.8])
    seen = Counter()
    for example in varied.examples("train")[:60]:
        cards = example.payload.get("cards") or [example.payload["dealer"], *example.payload["player"]]
        (first,) = asyncio.run(varied.env(example).reset(0))
        style = find_style(name, first["content"][0]["image"], cards, "")
        seen[style] += 1
        if name != "blackjack":
            token = str(Card.from_name(cards[0]).value)
            (step,) = play_replies(varied, example, [json.dumps({"action": token})])
            assert find_style(name, step.messages[0]["content"][0]["image"], cards, token) == style
    assert set(seen) == set(STYLES)
    one, two = (task.demonstrations("correct", num=40, seed=3) for task in (plain, varied))
    assert [each.messages[1] for each in one] == [each.messages[1] for each in two]
    assert all(image_and_text(a.messages[0])[0] != image_and_text(b.messages[0])[0] for a, b in zip(one, two, strict=True))
    assert plain.examples("eval") == varied.examples("eval")
    for key, value in (("train_arts", []), ("train_arts", ["gold"]), ("train_card_scales", [0.1]), ("train_card_scales", [])):
        with pytest.raises(ValueError, match=f"^task.options.{key}="):
            build_card_task(name, **{key: value})
