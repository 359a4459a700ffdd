"""The games of cards as tasks: gold replies earn full marks, splits share nothing, what no reply names is never an action."""

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.choices import build_task
from megatron_rl.cli.help import documented
from megatron_rl.config import TaskSettings
from megatron_rl.tasks.base import Step, Task
from megatron_rl.tasks.gym_cards.blackjack import Blackjack
from megatron_rl.tasks.gym_cards.blackjack_table import best_table
from megatron_rl.tasks.gym_cards.cards import Card
from megatron_rl.tasks.gym_cards.number_line import NumberLine
from megatron_rl.tasks.gym_cards.points import EZPOINTS, POINTS24
from megatron_rl.tasks.gym_cards.replies import Invalid, read_json, read_token
from megatron_rl.tasks.gym_cards.solvers import solution
from megatron_rl.tasks.options import OPTIONS
from megatron_rl.types import Example
from tests.contracts.test_configs import settings_of
from tests.contracts.test_field_docs import stands_alone

FEW = {"points24": {"train_hands": 200, "eval_hands": 100}, "blackjack": {"train_hands": 200, "eval_hands": 100}}


def task_of(name: str, **options: object) -> Task:
    return build_task(TaskSettings(name=name, max_turns=7, options=OPTIONS[name](**{**FEW.get(name, {}), **options})))


def play(task: Task, example: Example, replies: list[str], seed: int = 0) -> list[Step]:
    """An episode; nobody speaks after its end."""

    async def episode() -> list[Step]:
        env = task.env(example)
        (first,) = await env.reset(seed)
        assert [part["type"] for part in first["content"]] == ["image", "text"]
        return [await env.step(text) for text in replies]

    steps = asyncio.run(episode())
    assert not any(step.done for step in steps[:-1])
    return steps


@pytest.mark.parametrize(("name", "target"), [("ez_points", 12), ("ez_points", 10), ("points24", 24), ("points24", 30)])
def test_gold_earns_full_marks(name: str, target: int) -> None:
    task = task_of(name, eval_target=target)
    for split in ("train", "eval"):
        examples = task.examples(split)[:: 4 if name == "ez_points" else 2]
        goals = {example.payload["target"] for example in examples}
        assert goals == {target if split == "eval" else {"ez_points": 12, "points24": 24}[name]}
        for example in examples:
            replies = task.gold(example)
            numbers = tuple(Card.named(card).value for card in example.payload["cards"])
            assert bool(replies) == (name == "ez_points" or solution(numbers, example.payload["target"]) is not None)
            if replies:
                steps = play(task, example, replies)
                assert [step.reward for step in steps] == [0.0] * (len(steps) - 1) + [10.0] and steps[-1].reason == "goal"
                assert list(json.loads(replies[0])) == ["cards", "current formula", "thoughts", "action"]


def test_the_points_prompt_says_formula_tokens_and_target() -> None:
    task = task_of("ez_points")
    example = next(example for example in task.examples("eval") if example.payload["cards"][0][:-1] == "2")
    text = play(task, example, ['{"action": "2"}'])[0].messages[0]["content"][1]["text"]
    assert '"2"' in text and "makes 12" in text and " ".join(EZPOINTS.tokens) in text


def test_splits_share_no_drawing_and_no_numbers() -> None:
    for name, keys in (("ez_points", ("cards",)), ("blackjack", ("player", "dealer"))):
        task = task_of(name)
        train, evaluation = (
            {json.dumps([each.payload[key] for key in keys]) for each in task.examples(split)} for split in ("train", "eval")
        )
        assert train and evaluation and not train & evaluation
    task = task_of("ez_points")
    for split, num in (("train", 228), ("eval", 76)):
        examples = task.examples(split)
        assert len(examples) == num and sum(example.probability for example in examples) == pytest.approx(1, abs=1e-12)
    task = task_of("points24", train_hands=2000, eval_hands=500)
    train, evaluation = ({tuple(sorted(Card.named(card).value for card in each.payload["cards"])) for each in task.examples(split)}
                         for split in ("train", "eval"))  # fmt: skip
    assert len(train) > 300 and len(evaluation) > 100 and not train & evaluation
    solvable = task_of("points24", solvable=True).examples("train")
    assert all(solution(tuple(Card.named(card).value for card in each.payload["cards"])) for each in solvable)
    assert [each.id for each in solvable] == [f"train{number}" for number in range(200)]


@pytest.mark.parametrize("name", ["ez_points", "points24", "blackjack"])
def test_demonstrations_are_right_and_shared_prefixes(name: str) -> None:
    task = task_of(name)
    shown = task.demonstrations("correct", num=150, seed=3)
    again = task.demonstrations("correct", num=40, seed=3)
    assert len(shown) == 150 and [each.messages[1] for each in shown][:40] == [each.messages[1] for each in again]
    assert [each.messages[1] for each in task.demonstrations("correct", num=40, seed=4)] != [each.messages[1] for each in again]
    tokens = {"ez_points": EZPOINTS.tokens, "points24": POINTS24.tokens, "blackjack": ("stand", "hit")}[name]
    best, actions = best_table(), set()
    for demonstration in shown:
        reply = demonstration.messages[1]["content"][0]["text"]
        read = json.loads(reply)
        actions.add(tokens[read_json(reply, tokens)])
        if name == "blackjack":
            soft, points, up = "soft" in read["thoughts"], *[int(word) for word in read["thoughts"].split() if word.isdigit()]
            assert read["action"] == ("stand", "hit")[best[points, soft, up]]
        else:
            written, plan = read["current formula"] + read["action"], read["thoughts"]
            assert plan.startswith(written) and plan.endswith(("=12", "=24"))
            assert f'Current formula: "{read["current formula"]}"' in demonstration.messages[0]["content"][1]["text"]
    assert len(actions) > (1 if name == "blackjack" else 8)
    with pytest.raises(ValueError, match="^sft.splits=biased: "):
        task.demonstrations("biased", num=1, seed=0)


def test_blackjack_as_a_task_is_the_game_of_the_seed() -> None:
    task = task_of("blackjack")
    returns = []
    for seed, example in enumerate(task.examples("train")):
        env = Blackjack()
        env.reset(seed=seed, options={key: example.payload[key] for key in ("player", "dealer")})
        _, reward, over, _, _ = env.step(seed % 2)
        (step,) = play(task, example, [json.dumps({"action": ("stand", "hit")[seed % 2]})], seed)
        assert (step.reward, step.done) == (reward, over)
        assert over or np.array_equal(np.array(step.messages[0]["content"][0]["image"]), env.render())
        returns.append(reward)
    assert {-1.0, 0.0, 1.0} == set(returns)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"thoughts": "2 or 3", "action": "10"}', "10"), ("I append 10", "10"), ("1", "1"), ('"action": "1 0"', "1"),
        ("12", Invalid.NO_ACTION), ("", Invalid.NO_ACTION), ("2 3", Invalid.SEVERAL_ACTIONS), ("2, that is 2", "2"),
        ('{"ACTION": "="}', "="), ("110", Invalid.NO_ACTION),
        ('"action": "+", no: "*"', Invalid.SEVERAL_ACTIONS), ("\uff11", Invalid.NO_ACTION), ("\u0661", Invalid.NO_ACTION),
        ("__import__('os')", Invalid.NO_ACTION), ("+" * 5000, Invalid.TOO_LONG), ('"action": "action 4"', "4"),
    ],
)  # fmt: skip
def test_the_reading_by_token(text: str, expected: str) -> None:
    read = read_token(text, EZPOINTS.tokens)
    assert (read if isinstance(read, Invalid) else EZPOINTS.tokens[read]) == expected


def test_words_are_whole_ones() -> None:
    assert read_token("On white ground, understand: Hit!", ("stand", "hit")) == 1
    assert read_token("stand or hit", ("stand", "hit")) is Invalid.SEVERAL_ACTIONS
    assert read_json('{"action": "1"}', EZPOINTS.tokens) == 0 and read_json('{"action": 1}', EZPOINTS.tokens) is Invalid.NO_ACTION


PIECES = [*POINTS24.tokens, "action", '"', ":", " ", "{", "}", "\x00", "\u0130"]


@settings(max_examples=300, deadline=None)
@given(
    st.text() | st.lists(st.sampled_from([*POINTS24.tokens, "action", '"', ":", " ", "{", "}", "\x00", "\u0130"]), max_size=30).map("".join)
)
def test_no_text_breaks_the_reading_by_token(text: str) -> None:
    read = read_token(text, POINTS24.tokens)
    assert isinstance(read, Invalid) or POINTS24.tokens[read] in text


@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - {"alfworld"}))
@pytest.mark.parametrize(("invalid", "reward"), [("penalize", -1), ("repeat", 0), ("noop", 0), ("random", None)])
def test_what_a_reply_without_an_action_does(name: str, invalid: str, reward: int | None) -> None:
    task = task_of(name, invalid=invalid)
    example = task.examples("train")[3]
    effects = set()
    for seed in range(12):
        (step,) = play(task, example, ["nonsense"], seed)
        assert (step.call.error, step.call.ran) == ("not JSON", False), "always counted"
        assert (step.reward, step.done) == (reward, False) or invalid == "random"
        told = [part["text"] for message in step.messages for part in message["content"] if part["type"] == "text"]
        assert all(text.startswith("Your last reply was invalid: not JSON. ") == (invalid == "repeat") for text in told)
        images = [part["image"].tobytes() for message in step.messages for part in message["content"] if part["type"] == "image"]
        effects.add((step.reward, step.done, *images))
        assert play(task, example, ["nonsense"], seed)[0].reward == step.reward
    assert (len(effects) > 1) == (invalid == "random"), "the state stands still, or moves by chance"


def test_evaluations_may_look_otherwise_and_training_does_not() -> None:
    for name in ("ez_points", "points24", "blackjack"):
        plain, other = task_of(name), task_of(name, eval_art="night", eval_card_scale=0.5)
        assert plain.examples("train") == other.examples("train")
        one, two = plain.examples("eval")[0], other.examples("eval")[0]
        assert {**one.payload, "look": ("night", 0.5)} == two.payload
        looks = []
        for task, example in ((plain, one), (other, two)):
            (first,) = asyncio.run(task.env(example).reset(0))
            looks.append(np.array(first["content"][0]["image"]))
        assert (looks[0] != looks[1]).any(-1).mean() > 0.02
    line = task_of("number_line", eval_max_number=9)
    assert line.examples("train") == task_of("number_line").examples("eval") and len(line.examples("eval")) == 90 - 30
    for example in line.examples("eval"):
        current, target = example.payload["current"], example.payload["target"]
        assert max(current, target) > 5
        if abs(current - target) <= 7:
            assert [step.reward for step in play(line, example, line.gold(example))][-1] == 1.0
    game = NumberLine(max_number=9)
    game.reset(options={"current": 9, "target": 0})
    assert [game.step(1)[3] for _ in range(18)] == [False] * 17 + [True]


def test_options_come_from_the_command_line_typed() -> None:
    given = ("task=points24", "model.path=here", "run.dir=there")
    options = settings_of(*given, "task.options.eval_target=36", "task.options.legacy_rules=true").task.options
    assert options == OPTIONS["points24"](eval_target=36, legacy_rules=True)
    for word, said in (
        ("invalid=guess", "choose one of penalize"),
        ("eval_hands=many", "eval_hands"),
        ("invald=noop", "invald"),
        ("eval_art=x", "large"),
    ):
        with pytest.raises(Exception, match=said):
            settings_of(*given, f"task.options.{word}")
    for schema in OPTIONS.values():
        assert all(stands_alone(doc) for doc in documented(schema).values())
    for name, key in (("ez_points", "task.options.eval_target=0: "), ("points24", "task.options.eval_target=0: ")):
        with pytest.raises(ValueError, match=f"^{key}"):
            task_of(name, eval_target=0)
    with pytest.raises(ValueError, match="^task.max_turns=8: the game has 7 steps"):
        build_task(TaskSettings(name="ez_points", max_turns=8))
    longer = {"name": "number_line", "eval_max_turns": 18}
    assert build_task(TaskSettings(**longer, options=OPTIONS["number_line"](eval_max_number=9))).max_number == 9
    with pytest.raises(ValueError, match="^task.eval_max_turns=18: the game has 10 steps"):
        build_task(TaskSettings(**longer))
