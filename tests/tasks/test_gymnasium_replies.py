"""Replies with tags and actions that are texts: parsers, several actions in a turn, and rewards."""

import json
import random
import string
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.task_options import GymnasiumOptions
from megatron_rl.tasks.gym_cards.card_action_parser import InvalidAction
from megatron_rl.tasks.gymnasium_envs.action_grammar import ActionGrammar
from megatron_rl.tasks.gymnasium_envs.environment_client import load_grammar
from megatron_rl.tasks.gymnasium_envs.task import is_solved
from megatron_rl.types import Rollout, ToolCall, Turn
from tests.contracts.test_configs import settings_of
from tests.support.picture_environments import MODULE
from tests.tasks.test_gymnasium_env import make_task, pictures_of, run, run_all, texts_of
from tests.tasks.test_gymnasium_grammar import NAMED, NUMBERED, grammar_of

PIECES = ["<think>", "</think>", "<answer>", "</answer>", "walk", ",", " ", "0"]
WRONG_TAGS = "not <think>...</think><answer>...</answer>"


def tags(actions: str) -> str:
    return f"<think>none</think><answer>{actions}</answer>"


@pytest.mark.parametrize(
    ("grammar", "text", "expected"),
    [
        (NAMED, tags("walk"), [[2]]), (NAMED, tags(" walk ,rest,"), [[2], [3]]), (NAMED, tags("walk, rest, jump, fly"), [[2], [3], [4]]),
        (NAMED, tags("walk, fly, rest"), "no action"), (NAMED, tags("Walk"), "no action"), (NAMED, tags(""), "no action"),
        (NAMED, tags(" , "), "no action"), (NAMED, "\n" + tags("walk") + " ", [[2]]),
        (NAMED, "<think>a\nb</think>\n<answer>walk\n</answer>", [[2]]),
        (NUMBERED, tags("3, 0"), [[3], [0]]), (NUMBERED, tags("4"), "out of bounds"), (NUMBERED, tags("1.0"), "not a number"),
        (NUMBERED, tags("\u0663"), "not a number"), (NUMBERED, tags("9" * 3000), "not a number"),
        (NAMED, tags("walk") + "." * 5000, "too long"),
        (NAMED, "walk", WRONG_TAGS), (NAMED, "<answer>walk</answer>", WRONG_TAGS), (NAMED, tags("walk") + "walk", WRONG_TAGS),
        (NAMED, tags("walk") + tags("walk"), WRONG_TAGS), (NAMED, f"<think>{tags('rest')}</think><answer>walk</answer>", WRONG_TAGS),
        (NAMED, "<answer>walk</answer><think>none</think>", WRONG_TAGS), (NAMED, '{"action": "walk"}', WRONG_TAGS),
    ],
)  # fmt: skip
def test_what_a_reply_with_tags_means(grammar: ActionGrammar, text: str, expected: object) -> None:
    assert grammar.parse_tags(text, max_actions=3) == expected


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=200) | st.lists(st.sampled_from(PIECES)).map("".join))
def test_any_text_with_tags_is_read_without_an_exception(text: str) -> None:
    for grammar in (NAMED, NUMBERED):
        for reply in (text, tags(text)):
            actions = grammar.parse_tags(reply, max_actions=3)
            assert isinstance(actions, InvalidAction) or (1 <= len(actions) <= 3 and all(0 <= each[0] <= 4 for each in actions))


def test_texts_are_actions() -> None:
    """The bounds and characters of a Text space are those of gymnasium: a reply is valid exactly if
    the space contains the text. A random text is valid.
    """
    space, grammar = spaces.Text(5), grammar_of("AnySpace", space="text")
    assert grammar.describe() == "text of 1 to 5 characters" and {*grammar.characters} == {*string.ascii_letters, *string.digits}
    for text in ("a", "Zz9", "abcde", "abcdef", "", "a b", "ä", "a\n"):
        read = grammar.parse(json.dumps({"action": text}))
        assert read == [text] if space.contains(text) else isinstance(read, InvalidAction)
    assert grammar.parse('{"action": 3}') == "no action" == grammar.parse('{"action": ["a"]}')
    drawn = [grammar.sample(random.Random(seed)) for seed in range(40)]
    assert all(space.contains(text) for (text,) in drawn) and {len(text) for (text,) in drawn} == {1, 2, 3, 4, 5}
    assert grammar.format_action(["ab"]) == "ab"


def test_a_text_arrives() -> None:
    _, (step,) = run(make_task("Commands"), '{"action": "go on"}')
    assert texts_of(*step.messages)[0].startswith("go on\n") and step.tool_call.source == "go on"


def make_tags_task(**options: Any) -> Any:
    return make_task("Walk", **{"reply": "tags", "actions_per_turn": 3, "format_reward": 0.5, "kwargs": {"length": 4}, **options})


def test_several_actions_in_a_turn() -> None:
    """The reward of a turn is the sum of gymnasium's rewards and the reward for the format. Actions
    after the end of the episode are not taken. A prompt has the frame after the last action only.
    """
    task = make_tags_task(history=2, image_side=0)
    first, steps = run(task, tags("walk, rest, walk"), tags("rest, walk"))
    direct = gymnasium.make(f"{MODULE}:Walk-v0", render_mode="rgb_array", length=4, disable_env_checker=True)
    np.random.seed(0)
    direct.reset(seed=0)
    rewards, frames = [], [direct.render()]
    for action in (2, 3, 2, 3):
        rewards.append(direct.step(action)[1])
        frames.append(direct.render())
    assert [step.reward for step in steps] == pytest.approx([sum(rewards[:3]) + 0.5, rewards[3] + 0.5])
    assert [step.done for step in steps] == [False, True] and steps[1].tool_call.source == "rest, walk"
    (message,) = steps[0].messages
    assert texts_of(message)[0] == "Action: walk, rest, walk" and len(pictures_of(message)) == 2
    assert np.array_equal(pictures_of(message)[0], *pictures_of(first))
    assert np.array_equal(pictures_of(message)[1], frames[3])
    assert [step.action_char for step in steps] == [len("<think>none</think>")] * 2
    assert (task.find_action(tags("walk, rest, walk")), task.find_action("walk")) == (steps[0].action_char, None)


@pytest.mark.parametrize(("invalid", "reward"), [("penalize", -1.0), ("repeat", 0.0)])
def test_an_invalid_reply_has_no_reward_for_its_format(invalid: str, reward: float) -> None:
    _, steps = run(make_tags_task(invalid=invalid), "walk", tags("walk, fly"))
    assert [step.reward for step in steps] == [reward] * 2 and steps[0].action_char is None
    assert [step.tool_call.error for step in steps] == [WRONG_TAGS, "no action"]


def test_the_default_prompt_with_tags() -> None:
    (first, _), *_ = run_all(make_tags_task(), ([], 0, 0))
    assert texts_of(first)[0].endswith('<think>thoughts</think><answer>action</answer>; an action is "walk", "rest" or "jump"')


@pytest.mark.parametrize(
    ("rewards", "options", "expected"),
    [
        ([0.1, 0.1, 0.1], {"format_reward": 0.1}, False),
        ([0.5, 0.6], {"format_reward": 0.5}, True),
        ([0.5, 0.5], {"format_reward": 0.5}, False),
        ([0.8, 0.5], {"format_reward": 0.1, "success_reward": 1.1}, True),
        ([0.8, 0.5], {"format_reward": 0.1, "success_reward": 1.2}, False),
    ],
)
def test_the_reward_for_the_format_is_no_success(rewards: list[float], options: dict, expected: bool) -> None:
    turns = [Turn(sequence=0, token_span=(0, 1), text="", reward=reward, tool_call=ToolCall(tool="move", source="")) for reward in rewards]
    rollout = Rollout(task="gymnasium", example_id="seed0", group=0, sample_index=0, turns=turns, reason="terminated")
    assert is_solved(rollout, GymnasiumOptions(**options)) is expected


def test_refusals() -> None:
    """Spaces and names that tags cannot express are refused, and a history with more pictures than
    a sequence may have.
    """
    for name, options, message in (
        ("AnySpace", {"kwargs": {"space": "box"}}, r"^task.options.reply=tags: supports only Discrete actions, but .* is \[number"),
        ("Commands", {}, r"^task.options.reply=tags: supports only Discrete .* is text of 1 to 99 characters; use json"),
        ("Walk", {"actions": ["a, b", "c", "d"]}, "^task.options.actions=a, b: a name contains a comma, .*; name the actions differently"),
        ("Walk", {"actions": ["a", " c", "d"]}, "^task.options.actions= c: "),
    ):
        with pytest.raises(ValueError, match=message):
            load_grammar(GymnasiumOptions(id=f"{MODULE}:{name}-v0", reply="tags", **options))
    for options, message in (
        ({"reply": "xml"}, "^task.options.reply=xml: "),
        ({"actions_per_turn": 3}, "^task.options.actions_per_turn=3: needs task.options.reply=tags"),
        ({"actions_per_turn": 0}, "^task.options.actions_per_turn=0: must be in 1..64"),
        ({"format_reward": float("nan")}, "^task.options.format_reward=nan: "),
    ):
        with pytest.raises(ValueError, match=message):
            GymnasiumOptions(**options)
    words = ("task=gymnasium", "model.path=here", "run.dir=there", "task.options.id=A-v0", "task.options.history=9")
    with pytest.raises(ValueError, match="^engine.max_images=8: must be at least task.options.history=9, the number of images in a prompt"):
        settings_of(*words)
    assert settings_of(*words, "engine.max_images=9").engine.max_images == 9
