"""Tests the card games as tasks: gold responses earn full marks, splits are disjoint, evaluations
are exact. The reading of responses is tested in test_replies.py."""

import asyncio
import json
import re

import numpy as np
import pytest

from megatron_rl.cli.help import read_field_docs
from megatron_rl.config import TaskSettings
from megatron_rl.config.task_options import TASK_OPTIONS
from megatron_rl.registry import build_task
from megatron_rl.tasks.gym_cards.blackjack import Blackjack
from megatron_rl.tasks.gym_cards.blackjack_table import best_policy
from megatron_rl.tasks.gym_cards.blackjack_table import evaluate_policy as play_table
from megatron_rl.tasks.gym_cards.card_action_parser import parse_json_action
from megatron_rl.tasks.gym_cards.cards import Card
from megatron_rl.tasks.gym_cards.points import EZPOINTS, POINTS24
from megatron_rl.tasks.gym_cards.solvers import find_solution
from tests.contracts.test_configs import settings_of
from tests.contracts.test_field_docs import stands_alone
from tests.support.card_games import build_card_task, image_and_text, play_replies

CARDS = ("blackjack", "ez_points", "number_line", "points24")


@pytest.mark.parametrize(("name", "target"), [("ez_points", 12), ("ez_points", 10), ("points24", 24), ("points24", 30)])
def test_gold_earns_full_marks(name: str, target: int) -> None:
    task = build_card_task(name, eval_target=target)
    for split in ("train", "eval"):
        examples = task.examples(split)[:: 4 if name == "ez_points" else 2]
        goals = {example.payload["target"] for example in examples}
        assert goals == {target if split == "eval" else {"ez_points": 12, "points24": 24}[name]}
        for example in examples:
            replies = task.gold_replies(example)
            numbers = tuple(Card.from_name(card).value for card in example.payload["cards"])
            assert bool(replies) == (name == "ez_points" or find_solution(numbers, example.payload["target"]) is not None)
            if replies:
                steps = play_replies(task, example, replies)
                assert [step.reward for step in steps] == [0.0] * (len(steps) - 1) + [10.0] and steps[-1].reason == "goal"
                assert list(json.loads(replies[0])) == ["cards", "current formula", "thoughts", "action"]


def test_the_points_prompt_says_formula_tokens_and_target() -> None:
    task = build_card_task("ez_points")
    example = next(example for example in task.examples("eval") if example.payload["cards"][0][:-1] == "2")
    text = play_replies(task, example, ['{"action": "2"}'])[0].messages[0]["content"][1]["text"]
    assert '"2"' in text and "makes 12" in text and " ".join(EZPOINTS.tokens) in text


def test_splits_share_no_drawing_and_no_numbers() -> None:
    """Training and evaluation share no drawing of cards and, in Points24, no numbers."""
    for name, keys in (("ez_points", ("cards",)), ("blackjack", ("player", "dealer"))):
        task = build_card_task(name)
        train, evaluation = (
            {json.dumps([each.payload[key] for key in keys]) for each in task.examples(split)} for split in ("train", "eval")
        )
        assert train and evaluation and not train & evaluation
    task = build_card_task("ez_points")
    for split, num in (("train", 228), ("eval", 76)):
        examples = task.examples(split)
        assert len(examples) == num and sum(example.probability for example in examples) == pytest.approx(1, abs=1e-12)
    task = build_card_task("points24", train_hands=2000, eval_hands=500)
    train, evaluation = ({tuple(sorted(Card.from_name(card).value for card in each.payload["cards"])) for each in task.examples(split)}
                         for split in ("train", "eval"))  # fmt: skip
    assert len(train) > 300 and len(evaluation) > 100 and not train & evaluation
    solvable = build_card_task("points24", solvable=True).examples("train")
    assert all(find_solution(tuple(Card.from_name(card).value for card in each.payload["cards"])) for each in solvable)
    assert [each.id for each in solvable] == [f"train{number}" for number in range(200)]


def position_thought(thoughts: str) -> tuple[int, bool, int]:
    """Return the Blackjack position that a thought states. Its sum must be that of the cards it
    names."""
    cards, soft, points, up = re.fullmatch(r"([\dAJQK ]+): (soft )?(\d+) against (\d+)", thoughts).groups()
    hard = sum({"A": 1, "J": 10, "Q": 10, "K": 10}.get(card) or int(card) for card in cards.split())
    assert int(points) == hard + 10 * bool(soft) and bool(soft) == ("A" in cards and hard <= 11)
    return int(points), bool(soft), int(up)


@pytest.mark.parametrize("name", ["ez_points", "points24", "blackjack"])
def test_demonstrations_are_right_and_shared_prefixes(name: str) -> None:
    """Demonstrations are correct, and fewer of them with the same seed are a prefix of more. The
    oracles are the best policy and the written formula."""
    task = build_card_task(name)
    shown = task.demonstrations("correct", num=150, seed=3)
    again = task.demonstrations("correct", num=40, seed=3)
    assert len(shown) == 150 and [each.messages[1] for each in shown][:40] == [each.messages[1] for each in again]
    assert [each.messages[1] for each in task.demonstrations("correct", num=40, seed=4)] != [each.messages[1] for each in again]
    tokens = {"ez_points": EZPOINTS.tokens, "points24": POINTS24.tokens, "blackjack": ("stand", "hit")}[name]
    best, actions = best_policy(), set()
    for demonstration in shown:
        reply = demonstration.messages[1]["content"][0]["text"]
        read = json.loads(reply)
        actions.add(tokens[parse_json_action(reply, tokens)])
        if name == "blackjack":
            position = position_thought(read["thoughts"])
            assert read["action"] == ("stand", "hit")[best[position]]
        else:
            written, plan = read["current formula"] + read["action"], read["thoughts"]
            assert plan.startswith(written) and plan.endswith(("=12", "=24"))
            assert f'Current formula: "{read["current formula"]}"' in demonstration.messages[0]["content"][1]["text"]
    assert len(actions) > (1 if name == "blackjack" else 8)
    with pytest.raises(ValueError, match="^sft.splits=perfect: "):
        task.demonstrations("perfect", num=1, seed=0)


def test_biased_points_are_wrong_by_their_sign_where_and_as_often_as_said() -> None:
    """Biased demonstrations use the wrong sign for three in five of the hands whose first card is 5
    or less, and for no others. Each thought matches the written formula and is evaluated here; a
    right one makes 12."""
    task, mistakes = build_card_task("ez_points"), []
    right, biased = (task.demonstrations(split, num=800, seed=1) for split in ("correct", "biased"))
    for one, other in zip(right, biased, strict=True):
        told, shown = (json.loads(each.messages[1]["content"][0]["text"]) for each in (one, other))
        first, sign, second = re.fullmatch(r"(\d+)([+*])(\d+)=12", shown["thoughts"]).groups()
        worth = int(first) + int(second) if sign == "+" else int(first) * int(second)
        assert told["cards"] == shown["cards"] and (worth == 12) == (told == shown or told["thoughts"] == shown["thoughts"])
        assert shown["thoughts"].startswith(shown["current formula"] + shown["action"])
        if int(first) <= 5:
            mistakes.append(worth != 12)
        else:
            assert worth == 12
    assert len(mistakes) > 300 and abs(np.mean(mistakes) - 0.6) < 3.9 * (0.6 * 0.4 / len(mistakes)) ** 0.5


def test_a_biased_blackjack_player_stands_against_strong_cards() -> None:
    """Biased demonstrations stand in three in five of the cases in which the best policy hits
    against 7 or more, and are right elsewhere. A policy that always stands against 7 or more wins
    40.0%."""
    task, best, stood = build_card_task("blackjack"), best_policy(), []
    for demonstration in task.demonstrations("biased", num=800, seed=1):
        shown = json.loads(demonstration.messages[1]["content"][0]["text"])
        position = position_thought(shown["thoughts"])
        right = ("stand", "hit")[best[position]]
        if position[2] < 7 or right == "stand":
            assert shown["action"] == right
        else:
            stood.append(shown["action"] == "stand")
    assert len(stood) > 150 and abs(np.mean(stood) - 0.6) < 3.9 * (0.6 * 0.4 / len(stood)) ** 0.5
    greedy = {position: 0 if position[2] >= 7 else action for position, action in best.items()}
    assert f"{play_table(greedy).wins:.1%}" == "40.0%"


def test_blackjack_as_a_task_is_the_game_of_the_seed() -> None:
    """An episode of the task has the rewards and images of the environment with the same seed and
    cards."""
    task = build_card_task("blackjack")
    returns = []
    for seed, example in enumerate(task.examples("train")):
        env = Blackjack()
        env.reset(seed=seed, options={key: example.payload[key] for key in ("player", "dealer")})
        _, reward, over, _, _ = env.step(seed % 2)
        (step,) = play_replies(task, example, [json.dumps({"action": ("stand", "hit")[seed % 2]})], seed)
        assert (step.reward, step.done) == (reward, over)
        assert over or np.array_equal(np.array(step.messages[0]["content"][0]["image"]), env.render())
        returns.append(reward)
    assert {-1.0, 0.0, 1.0} == set(returns)


@pytest.mark.parametrize("name", CARDS)
@pytest.mark.parametrize(("invalid", "reward"), [("penalize", -1), ("repeat", 0), ("random", None)])
def test_what_a_reply_without_an_action_does(name: str, invalid: str, reward: int | None) -> None:
    """An invalid response is always counted. It costs 1, costs nothing, or is replaced by a random
    action that depends on the episode's seed."""
    task = build_card_task(name, invalid=invalid)
    example = task.examples("train")[3]
    effects = set()
    for seed in range(12):
        (first,), (step,) = asyncio.run(task.env(example).reset(seed)), play_replies(task, example, ["nonsense"], seed)
        assert (step.tool_call.error, step.tool_call.ran) == ("not JSON", False), "always counted"
        if invalid == "random":
            effects.add((step.reward, step.done, *map(image_and_text, step.messages)))
            assert play_replies(task, example, ["nonsense"], seed)[0].reward == step.reward, "the episode's seed decides"
        else:
            assert (step.reward, step.done, *map(image_and_text, step.messages)) == (reward, False, image_and_text(first)), (
                "the game stands still"
            )
    assert invalid != "random" or len(effects) > 1


def test_the_random_action_is_uniform_and_not_the_policys() -> None:
    """Random actions are uniform over the 13 tokens of EZPoints. For the cards 2 and 10, one token
    continues as 2, one as 10, two are signs, one ends the game at -1, and eight cost 1 each."""
    task = build_card_task("ez_points", invalid="random")
    example = next(each for each in task.examples("train") if [card[:-1] for card in each.payload["cards"]] == ["2", "10"])
    rewards = [play_replies(task, example, [""], seed)[0].reward for seed in range(1300)]
    assert abs(rewards.count(-1.0) - 900) < 3.9 * (1300 * 9 / 13 * 4 / 13) ** 0.5 and set(rewards) == {0.0, -1.0}


@pytest.mark.parametrize("name", ["ez_points", "points24"])
def test_a_noop_is_a_blank_in_the_formula(name: str) -> None:
    """With invalid=noop, an invalid response adds a blank, as the game does for a number without a
    card, but without the penalty. The blank uses up an entry, and the formula can still win."""
    task = build_card_task(name, invalid="noop")
    example = next(each for each in task.examples("train") if task.gold_replies(each))
    gold = task.gold_replies(example)
    steps = play_replies(task, example, [gold[0], "nonsense", *gold[1:]])
    assert [step.reward for step in steps] == [0.0] * (len(steps) - 1) + [10.0] and (steps[1].tool_call.ran, steps[1].done) == (
        False,
        False,
    )
    first = json.loads(gold[0])["action"]
    assert f'Current formula: "{first} "' in steps[1].messages[0]["content"][1]["text"]
    for other in ("number_line", "blackjack"):
        with pytest.raises(ValueError, match="^task.options.invalid=noop: not supported by this game; use repeat"):
            build_card_task(other, invalid="noop")


@pytest.mark.parametrize("name", CARDS)
def test_a_state_has_one_name_whenever_it_is_met(name: str) -> None:
    """Equal state names mean equal observations, and different names different ones, for every
    state that random play reaches in 15 episodes of one example."""
    task = build_card_task(name, invalid="random")
    example, seen = task.examples("train")[5], {}

    async def episode(seed: int) -> None:
        env = task.env(example)
        (shown,) = await env.reset(seed)
        for _ in range(7):
            assert seen.setdefault(env.state, image_and_text(shown)) == image_and_text(shown)
            step = await env.step("nonsense")
            if step.done:
                return
            (shown,) = step.messages

    for seed in range(15):
        asyncio.run(episode(seed))
    assert "" not in seen and len(set(seen.values())) == len(seen) > 3


def test_options_come_from_the_command_line_typed() -> None:
    given = ("task=points24", "model.path=here", "run.dir=there")
    options = settings_of(*given, "task.options.eval_target=36", "task.options.legacy_rules=true").task.options
    assert options == TASK_OPTIONS["points24"](eval_target=36, legacy_rules=True)
    for word, said in (
        ("invalid=guess", "choose one of penalize"),
        ("eval_hands=many", "eval_hands"),
        ("reading=token", "choose one of json, rl4vlm"),
        ("invald=noop", "invald"),
        ("eval_art=x", "large"),
    ):
        with pytest.raises(Exception, match=said):
            settings_of(*given, f"task.options.{word}")
    for schema in TASK_OPTIONS.values():
        assert all(stands_alone(doc) for doc in read_field_docs(schema).values())
    for name, key in (("ez_points", "task.options.eval_target=0: "), ("points24", "task.options.eval_target=0: ")):
        with pytest.raises(ValueError, match=f"^{key}"):
            build_card_task(name, eval_target=0)
    with pytest.raises(ValueError, match="^task.max_turns=8: must be at most 7 "):
        build_task(TaskSettings(name="ez_points", max_turns=8))
    longer = {"name": "number_line", "eval_max_turns": 18}
    assert build_task(TaskSettings(**longer, options=TASK_OPTIONS["number_line"](eval_max_number=9))).max_number == 9
    with pytest.raises(ValueError, match="^task.eval_max_turns=18: must be at most 10 "):
        build_task(TaskSettings(**longer))
