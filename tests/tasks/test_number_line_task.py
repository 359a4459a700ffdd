"""Tests NumberLine as a task: responses are read strictly, exploits earn nothing, and
demonstrations are wrong exactly where they should be."""

import asyncio
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import TaskSettings
from megatron_rl.rewards.rubric import RubricScore
from megatron_rl.rollout.task import Step, Task
from megatron_rl.tasks.gym_cards.card_action_parser import InvalidAction, parse_json_action
from megatron_rl.tasks.gym_cards.number_line import ACTIONS, MAX_STEPS, STATES, compute_policy_success, draw_state
from megatron_rl.tasks.gym_cards.task import PROMPT, NumberLineTask, write_reply
from megatron_rl.types import Message, Rollout, Turn
from tests.support.rollout_factory import make_reward_input

TASK: Task = NumberLineTask(TaskSettings(name="number_line"))
UP = '{"action": "+"}'
NESTED = '{"action": "+", "thoughts": ' + "[" * 100_000 + "]" * 100_000 + "}"
EXPLOITS = {
    "two objects": (UP + UP, InvalidAction.NOT_JSON),
    "two lines": (UP + "\n" + UP, InvalidAction.NOT_JSON),
    "trailing text": (UP + " +", InvalidAction.NOT_JSON),
    "leading text": ("action: " + UP, InvalidAction.NOT_JSON),
    "code fence": (f"```json\n{UP}\n```", InvalidAction.NOT_JSON),
    "bare sign": ("+", InvalidAction.NOT_JSON),
    "empty": ("", InvalidAction.NOT_JSON),
    "cut off": ('{"action": "+"', InvalidAction.NOT_JSON),
    "single quotes": ("{'action': '+'}", InvalidAction.NOT_JSON),
    "not a number": ('{"current number": NaN, "action": "+"}', InvalidAction.NOT_JSON),
    "infinity": ('{"current number": -Infinity, "action": "+"}', InvalidAction.NOT_JSON),
    "nested 3000 deep": ('{"x": ' + "[" * 2000 + "]" * 2000 + ', "action": "+"}', InvalidAction.NOT_JSON),
    "brackets only": ("[" * 4000, InvalidAction.NOT_JSON),
    "nested 100000 deep": (NESTED, InvalidAction.TOO_LONG),
    "1 MB of signs": ("+" * 1_000_000, InvalidAction.TOO_LONG),
    "1 MB of space": (UP + " " * 1_000_000, InvalidAction.TOO_LONG),
    "list of objects": (f"[{UP}]", InvalidAction.NOT_AN_OBJECT),
    "quoted object": (json.dumps(UP), InvalidAction.NOT_AN_OBJECT),
    "null": ("null", InvalidAction.NOT_AN_OBJECT),
    "both signs": ('{"action": "-", "action": "+"}', InvalidAction.REPEATED_KEY),
    "same sign twice": ('{"action": "+", "action": "+"}', InvalidAction.REPEATED_KEY),
    "repeated inside": ('{"action": "+", "x": {"y": 1, "y": 2}}', InvalidAction.REPEATED_KEY),
    "escaped repetition": ('{"action": "-", "\\u0061ction": "+"}', InvalidAction.REPEATED_KEY),
    "list of signs": ('{"action": ["+", "-"]}', InvalidAction.NO_ACTION),
    "object": ('{"action": {"+": 1}}', InvalidAction.NO_ACTION),
    "number": ('{"action": 1}', InvalidAction.NO_ACTION),
    "true": ('{"action": true}', InvalidAction.NO_ACTION),
    "spaced sign": ('{"action": " +"}', InvalidAction.NO_ACTION),
    "two signs": ('{"action": "+-"}', InvalidAction.NO_ACTION),
    "no sign": ('{"action": ""}', InvalidAction.NO_ACTION),
    "in the thoughts only": ('{"thoughts": "+"}', InvalidAction.NO_ACTION),
    "other case": ('{"Action": "+"}', InvalidAction.NO_ACTION),
    "action inside": ('{"answer": {"action": "+"}}', InvalidAction.NO_ACTION),
}


def play(task: Task, start: int, replies: list[str]) -> list[Step]:
    """Play an episode from the start with index `start`. It must not be done before the last
    response."""

    async def episode() -> list[Step]:
        env = task.env(task.examples("test")[start])
        assert len(await env.reset(seed=0)) == 1
        return [await env.step(text) for text in replies]

    steps = asyncio.run(episode())
    assert not any(step.done for step in steps[:-1])
    assert all(step.is_new_prompt != step.done and len(step.messages) == (0 if step.done else 1) for step in steps)
    return steps


def scored(payload: dict, replies: list[str], steps: list[Step]) -> RubricScore:
    turns = [Turn(sequence=0, token_span=(0, 1), text=text, reward=step.reward) for text, step in zip(replies, steps, strict=True)]
    return asyncio.run(TASK.rubric.score(make_reward_input(*turns, payload=payload)))


def rollout(reward: float) -> Rollout:
    return Rollout(task="number_line", example_id="e", group=0, sample_index=0, reward=reward)


def test_examples_are_the_30_starts_weighted_as_dealt_in_every_split() -> None:
    train, test = TASK.examples("train"), TASK.examples("test")
    assert train == test and len({example.id for example in train}) == 30
    weights = {(example.payload["current"], example.payload["target"]): example.probability for example in train}
    assert weights.keys() == set(STATES)
    assert weights[0, 1] == pytest.approx(2 / 36) and weights[1, 0] == pytest.approx(1 / 36)
    assert sum(weights.values()) == pytest.approx(1, abs=1e-12)


def test_prompt_is_short_and_names_the_keys_in_order() -> None:
    assert len(PROMPT.split()) <= 40
    keys = re.findall(r'"([a-z ]+)":', PROMPT)
    assert keys == ["current number", "target number", "thoughts", "action"] == list(json.loads(write_reply((0, 1), 1)))


@pytest.mark.parametrize("start", range(30))
def test_gold_earns_full_marks(start: int) -> None:
    example = TASK.examples("test")[start]
    replies = TASK.gold_replies(example)
    assert len(replies) == abs(example.payload["current"] - example.payload["target"])
    steps = play(TASK, start, replies)
    score = scored(example.payload, replies, steps)
    assert (score.reward, score.outcome_reward, score.reward_terms) == (1.0, 0.0, {"return": 1.0})
    assert (steps[-1].done, steps[-1].reason) == (True, "goal")
    assert TASK.success(rollout(score.reward)) and not TASK.success(rollout(0.0)) and not TASK.success(rollout(-1.0))


def test_every_observation_is_a_new_context_that_shows_the_state() -> None:
    """Each observation is a new prompt with the image of the current state."""

    async def episode() -> list[list[Message]]:
        env = TASK.env(TASK.examples("test")[STATES.index((1, 4))])
        seen = [await env.reset(seed=5)]
        for text in (write_reply((1, 4), 1), "nonsense", write_reply((2, 4), 0)):
            seen.append((await env.step(text)).messages)
        return seen

    seen = asyncio.run(episode())
    for (message,), state in zip(seen, [(1, 4), (2, 4), (2, 4), (1, 4)], strict=True):
        image, text = message["content"]
        assert message["role"] == "user" and text == {"type": "text", "text": PROMPT}
        assert image["type"] == "image" and np.array_equal(np.array(image["image"]), np.array(draw_state(state)))


@pytest.mark.parametrize("name", EXPLOITS)
def test_exploits_are_invalid_and_earn_nothing(name: str) -> None:
    """A malformed response is invalid with its reason, costs 1 and does not move the player."""
    text, kind = EXPLOITS[name]
    assert parse_json_action(text, ACTIONS) is kind
    start = STATES.index((4, 5))  # where an accepted "+" would win immediately
    steps = play(TASK, start, [text] * 9 + [write_reply((4, 5), 1)])
    assert [step.reward for step in steps] == [-1.0] * 9 + [1.0]
    assert [(step.tool_call.error, step.tool_call.ran) for step in steps] == [(kind, False)] * 9 + [("", True)]
    assert not TASK.success(rollout(-1.0 + 1.0)), "an episode with an invalid reply is no success"


@pytest.mark.parametrize(
    "text",
    [UP, f" \n\t{UP}\r\n", '{"action": "+", "mood": [1, {"a": null}]}', '{"x": "?", "action": "\\u002b"}', write_reply((0, 5), 1)],
)
def test_valid_replies(text: str) -> None:
    assert parse_json_action(text, ACTIONS) == 1
    assert parse_json_action(text.replace("+", "-").replace("002b", "002d"), ACTIONS) == 0


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("action"), inner),
)
PIECES = ["{", "}", "[", "]", '"', ":", ",", "action", "+", "NaN", "\\", "\\ud800", "1e999", "9" * 4500, " ", "\n", "\x00", "\ufeff", UP]


@settings(max_examples=500, deadline=None)
@given(st.text() | JSON_VALUES.map(json.dumps) | st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_no_text_breaks_the_reader(text: str) -> None:
    read = parse_json_action(text, ACTIONS)
    if isinstance(read, InvalidAction):
        return
    assert text.count("action") >= 1 or "\\u" in text
    value = json.loads(text)
    assert isinstance(value, dict) and value["action"] == "-+"[read]


@given(st.sampled_from(STATES), st.sampled_from([0, 1]), st.data())
def test_a_cut_reply_is_no_action(state: tuple[int, int], action: int, data: st.DataObject) -> None:
    """A response that is cut at any character has no action."""
    reply = write_reply(state, action)
    assert parse_json_action(reply, ACTIONS) == action
    assert isinstance(parse_json_action(reply[: data.draw(st.integers(0, len(reply) - 1))], ACTIONS), InvalidAction)


def test_moves_pay_as_the_game_says() -> None:
    assert [step.reward for step in play(TASK, STATES.index((0, 1)), [UP])] == [1.0]
    back_and_forth = [UP, '{"action": "-"}'] * 5
    assert [step.reward for step in play(TASK, STATES.index((0, 5)), back_and_forth)] == [0.0, -1.0] * 5
    with pytest.raises(ValueError, match="^task.max_turns=11: "):
        NumberLineTask(TaskSettings(name="number_line", max_turns=MAX_STEPS + 1))


def test_find_action_is_where_a_step_says() -> None:
    reply = write_reply(STATES[0], 1)
    (step,) = play(TASK, 0, [reply])
    assert TASK.find_action(reply) == step.action_char == reply.index('"action"')
    assert TASK.find_action("no key") is None


def read_demonstrations(split: str, num: int) -> list[tuple[tuple[int, int], bool, str]]:
    """Return the state (recovered from the image), whether the action goes the wrong way, and the
    thoughts of each demonstration."""
    state_of_bytes = {np.array(draw_state(state)).tobytes(): state for state in STATES}
    image_bytes: dict[int, bytes] = {}
    read = []
    for demonstration in TASK.demonstrations(split, num=num, seed=11):
        user, assistant = demonstration.messages
        shown, prompt = user["content"]
        key = id(shown["image"])
        if key not in image_bytes:
            image_bytes[key] = np.array(shown["image"]).tobytes()
        current, target = state_of_bytes[image_bytes[key]]
        (written,) = assistant["content"]
        reply = json.loads(written["text"])
        assert (user["role"], assistant["role"], prompt["text"], written["type"]) == ("user", "assistant", PROMPT, "text")
        assert (reply["current number"], reply["target number"]) == (current, target), "the reading is always right"
        assert parse_json_action(written["text"], ACTIONS) == "-+".index(reply["action"])
        read.append(((current, target), (reply["action"] == "+") != (target > current), reply["thoughts"]))
        assert reply["thoughts"] == {"+": "Raise it.", "-": "Lower it."}[reply["action"]], "the thought carries the decision"
    assert len(image_bytes) == 30, "demonstrations share the 30 pictures instead of drawing their own"
    return read


def test_demonstrations_are_wrong_where_they_say_and_nowhere_else() -> None:
    """Biased demonstrations are wrong in 75% of the states with targets 1 and 4, within four
    standard errors, and right in all others."""
    assert not any(wrong for _, wrong, _ in read_demonstrations("correct", 6000))
    biased = read_demonstrations("biased", 30_000)
    assert not any(wrong for (_, target), wrong, _ in biased if target not in (1, 4))
    for state in STATES:
        errors = [wrong for shown, wrong, _ in biased if shown == state]
        assert abs(len(errors) - 1000) < 4 * (30_000 * 1 / 30 * 29 / 30) ** 0.5, "states are drawn uniformly"
        if state[1] in (1, 4):
            assert abs(sum(errors) - 0.75 * len(errors)) < 4 * (0.75 * 0.25 * len(errors)) ** 0.5, state
    assert len({len(thoughts) for _, _, thoughts in biased}) == 1


def test_demonstrations_repeat_with_their_seed_and_fewer_are_a_prefix() -> None:
    assert TASK.demonstrations("biased", num=50, seed=2) == TASK.demonstrations("biased", num=80, seed=2)[:50]
    assert TASK.demonstrations("biased", num=50, seed=2) != TASK.demonstrations("biased", num=50, seed=3)
    with pytest.raises(ValueError, match="^sft.splits=biassed: "):
        TASK.demonstrations("biassed", num=1, seed=0)


def test_success_after_a_perfectly_learned_biased_warm_start() -> None:
    """A policy that has learned the biased demonstrations perfectly has the hand-computed success.
    Decoded greedily, it loses targets 1 (7/36 of the starts) and 4 (6/36); sampled, it takes each
    right step with 0.25 for these 13/36."""
    greedy, sampled = {}, {}
    for current, target in STATES:
        right = 0.25 if target in (1, 4) else 1.0
        up = right if target > current else 1 - right
        sampled[current, target] = (1 - up, up)
        greedy[current, target] = (float(up < 0.5), float(up > 0.5))
    assert compute_policy_success(greedy) == pytest.approx(23 / 36, abs=1e-12)
    lost = 6 * 0.25 + 2 * 0.25**2 + 2 * 0.25**3 + 3 * 0.25**4
    assert compute_policy_success(sampled) == pytest.approx((23 + lost) / 36, abs=1e-12) and round((23 + lost) / 36, 3) == 0.685
