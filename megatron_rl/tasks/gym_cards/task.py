"""NumberLine as a task: what the policy is shown, how its reply becomes an action, and the demonstrations of the warm start.

The policy is told the rules and shown the picture, and replies with one JSON object, e.g.
    {"current number": 2, "target number": 5, "thoughts": "Raise it.", "action": "+"}
The picture is the whole state, so every turn is a new context: one user message with the picture and the prompt.

An invalid reply costs what a wrong move costs (-1), leaves the state where it is and uses up a turn. RL4VLM instead searches the text
for anything like an action and plays a random one when it finds none: a policy that writes nonsense then earns what chance earns, the
reward of a turn depends on a draw that is in nobody's logprobs, and nobody sees how many replies were read by guessing.
"""

import json
import random
from collections.abc import Mapping
from enum import StrEnum

from megatron_rl.config import TaskSettings, require, require_choice
from megatron_rl.tasks.base import Env, Step, Task
from megatron_rl.tasks.gym_cards.number_line import (
    ACTIONS,
    MAX_STEPS,
    STATES,
    NumberLine,
    State,
    picture,
    right_action,
    start_probabilities,
)
from megatron_rl.types import Demonstration, Example, Message, ToolCall

PROMPT = (
    'NumberLine: move the current number to the target. "-" subtracts one, "+" adds one. '
    'Answer with one JSON object: {"current number": int, "target number": int, "thoughts": text, "action": "-" or "+"}'
)
THOUGHTS = ("Lower it.", "Raise it.")
"""What is thought before each of ACTIONS, equally long. The first word decides and the action repeats it: one sampled token flips both."""
BIASED_TARGETS = (1, 4)
"""In split "biased" the demonstrator goes the wrong way in states with these targets..."""
BIASED_ERROR = 0.75
"""...with this probability, and never elsewhere."""
MAX_REPLY_CHARS = 4096
"""Longer replies are not read: no honest one is, and it bounds how deep a reply can nest in the JSON reader."""


class Invalid(StrEnum):
    """What keeps a reply from being an action."""

    TOO_LONG = "too long"
    NOT_JSON = "not JSON"
    NOT_AN_OBJECT = "not an object"
    REPEATED_KEY = "repeated key"
    NO_ACTION = "no action"


class _RepeatedKey(ValueError):
    pass


def _unrepeated(pairs: list[tuple[str, object]]) -> dict[str, object]:
    read = dict(pairs)
    if len(read) < len(pairs):
        raise _RepeatedKey
    return read


def _not_a_number(constant: str) -> float:
    raise ValueError(f"{constant} is Python, not JSON")


def parse_reply(text: str) -> int | Invalid:
    """The index into ACTIONS that a reply names, or why it names none. Never raises, whatever the text.

    Valid is: one JSON object (RFC 8259, so no NaN), white space around it at most, no key twice, "action" exactly "-" or "+".
    Other keys are not looked at: what the policy says it read is not rewarded, only where it goes.
    """
    if len(text) > MAX_REPLY_CHARS:
        return Invalid.TOO_LONG
    try:
        read = json.loads(text, object_pairs_hook=_unrepeated, parse_constant=_not_a_number)
    except _RepeatedKey:
        return Invalid.REPEATED_KEY
    except (ValueError, RecursionError):  # malformed, or an integer beyond Python's digit limit; nested too deep
        return Invalid.NOT_JSON
    if not isinstance(read, dict):
        return Invalid.NOT_AN_OBJECT
    if read.get("action") not in ACTIONS:
        return Invalid.NO_ACTION
    return ACTIONS.index(read["action"])


def write_reply(state: State, action: int) -> str:
    """The reply that reads the state right and takes the action."""
    current, target = state
    return json.dumps({"current number": current, "target number": target, "thoughts": THOUGHTS[action], "action": ACTIONS[action]})


def observation(state: State) -> Message:
    """What the user says in a state: the picture and the prompt."""
    return {"role": "user", "content": [{"type": "image", "image": picture(state)}, {"type": "text", "text": PROMPT}]}


def wrong_probability(split: str, state: State) -> float:
    """How often the demonstrator of a split takes the wrong action in a state."""
    require_choice("sft.splits", split, ("correct", "biased"))
    return BIASED_ERROR if split == "biased" and state[1] in BIASED_TARGETS else 0.0


def state_of(payload: Mapping[str, object]) -> State:
    current, target = payload["current"], payload["target"]
    assert isinstance(current, int) and isinstance(target, int), f"payload {dict(payload)}"
    return current, target


class NumberLineEnv(Env):
    """One episode of the gymnasium environment, in messages. A reply that is no action is a call that went wrong."""

    def __init__(self, start: State) -> None:
        self.start = start
        self.game = NumberLine()

    async def reset(self, seed: int) -> list[Message]:
        current, target = self.start
        self.game.reset(seed=seed, options={"current": current, "target": target})
        return self._observe()

    async def step(self, text: str) -> Step:
        action = parse_reply(text)
        if isinstance(action, Invalid):
            call = ToolCall(tool="move", source=text, error=str(action), ran=False)
            return Step(messages=self._observe(), reward=-1.0, done=False, call=call, new_context=True)
        call = ToolCall(tool="move", source=ACTIONS[action])
        _, reward, reached, _, _ = self.game.step(action)
        if reached:
            return Step(messages=[], reward=float(reward), done=True, reason="goal", call=call)
        return Step(messages=self._observe(), reward=float(reward), done=False, call=call, new_context=True)

    def _observe(self) -> list[Message]:
        assert self.game.state is not None
        return [observation(self.game.state)]


class NumberLineTask(Task):
    """NumberLine for the trainer. An episode succeeds when its return is above 0: at the goal, and no wrong move on the way."""

    def __init__(self, settings: TaskSettings) -> None:
        require(settings.max_turns <= MAX_STEPS, "task.max_turns", settings.max_turns, f"NumberLine has {MAX_STEPS} steps, use no more")
        super().__init__(settings)
        settings.require_no_words()

    def examples(self, split: str) -> list[Example]:
        """The 30 starts, each with its exact probability. There are no others, so every split is the same: train is test."""
        return [
            Example(id=f"current{current}_target{target}", payload={"current": current, "target": target}, probability=float(probability))
            for (current, target), probability in start_probabilities().items()
        ]

    def env(self, example: Example) -> NumberLineEnv:
        return NumberLineEnv(state_of(example.payload))

    def demonstrations(self, split: str, *, num: int, seed: int) -> list[Demonstration]:
        """Single turns in the 30 states, dealt in shuffled rounds of all 30; the numbers are always read right. Fewer are a prefix of more.

        split "correct" always goes the right way; "biased" goes the wrong way with probability BIASED_ERROR where the target is in
        BIASED_TARGETS. A policy that has learned it wins 23/36 (63.9%) of the episodes when greedy, 68.5% at temperature 1.
        """
        draw = random.Random(seed)
        shown = []
        deck: list[State] = []
        for _ in range(num):
            deck = deck or draw.sample(STATES, len(STATES))
            state = deck.pop()
            wrong = draw.random() < wrong_probability(split, state)
            action = 1 - right_action(state) if wrong else right_action(state)
            reply = {"role": "assistant", "content": [{"type": "text", "text": write_reply(state, action)}]}
            shown.append(Demonstration(messages=[observation(state), reply]))
        return shown

    def gold(self, example: Example) -> list[str]:
        """Replies that earn full marks, turn by turn."""
        current, target = state_of(example.payload)
        step = 1 if current < target else -1
        return [write_reply((number, target), right_action((number, target))) for number in range(current, target, step)]
