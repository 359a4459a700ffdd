"""NumberLine as a task: prompt, reply format, and demonstrations for the SFT stage.

The policy receives an image and the rules, and replies with one JSON object:

    {"current number": 2, "target number": 5, "thoughts": "Raise it.", "action": "+"}

The image shows the complete state, so every turn is a new sequence: one user message with the image
and the prompt.

By default, an invalid reply has the same reward as a wrong move (-1), leaves the state unchanged
and uses up a turn. The setting task.options.invalid selects other effects (gym_cards/game.py).
"""

import json
import random
from collections.abc import Mapping
from itertools import product

from megatron_rl.config import TaskSettings, require_choice
from megatron_rl.config.task_options import GameOptions, NumberLineOptions
from megatron_rl.tasks.gym_cards.game import GameEnv, GameTask, StateView, make_user_message
from megatron_rl.tasks.gym_cards.number_line import (
    ACTIONS,
    MAX_NUMBER,
    MAX_STEPS,
    STATES,
    NumberLine,
    NumberLineState,
    draw_state,
    optimal_action,
    start_probabilities,
)
from megatron_rl.types import Demonstration, Example, Message

PROMPT = (
    'NumberLine: move the current number to the target. "-" subtracts one, "+" adds one. '
    'Answer with one JSON object: {"current number": int, "target number": int, "thoughts": text, "action": "-" or "+"}'
)
THOUGHTS = ("Lower it.", "Raise it.")
"""Thoughts in a reply, one text for each action in ACTIONS. All texts have the same length. The
first word of the text already determines the action, so a single sampled token decides which action
is taken.
"""
BIASED_TARGETS = (1, 4)
"""Targets for which the demonstrator of the "biased" split takes wrong actions."""
BIASED_ERROR = 0.75
"""Probability that the demonstrator of the "biased" split takes the wrong action if the target is
one of BIASED_TARGETS. For other targets, the demonstrator always takes the right action.
"""


def write_reply(state: NumberLineState, action: int) -> str:
    """Return a reply that states the numbers correctly and takes the given action."""
    current, target = state
    return json.dumps({"current number": current, "target number": target, "thoughts": THOUGHTS[action], "action": ACTIONS[action]})


def make_observation(state: NumberLineState) -> Message:
    """Return the user message for a state: its image and the prompt."""
    return make_user_message(draw_state(state), PROMPT)


def mistake_probability(split: str, state: NumberLineState) -> float:
    """Return the probability that a split's demonstrator takes the wrong action in a state."""
    require_choice("sft.splits", split, ("correct", "biased"))
    return BIASED_ERROR if split == "biased" and state[1] in BIASED_TARGETS else 0.0


def make_example(state: NumberLineState, *, probability: float | None = None, max_number: int | None = None) -> Example:
    """Return the example with the given start state."""
    current, target = state
    payload = {"current": current, "target": target} | ({} if max_number is None else {"max_number": max_number})
    return Example(id=f"current{current}_target{target}", payload=payload, probability=probability)


def read_state(payload: Mapping[str, object]) -> NumberLineState:
    """Read the start state from an example's payload."""
    current, target = payload["current"], payload["target"]
    assert isinstance(current, int) and isinstance(target, int), f"payload {dict(payload)}"
    return current, target


class NumberLineEnv(GameEnv):
    """Environment for one NumberLine episode that begins in a given start state."""

    def __init__(self, start: NumberLineState, *, options: GameOptions = GameOptions(), max_number: int = MAX_NUMBER) -> None:
        (current, target), self.number_line = start, NumberLine(max_number=max_number)
        super().__init__(
            self.number_line, {"current": current, "target": target}, actions=ACTIONS, options=options, view_state=self._view_state
        )

    def _view_state(self) -> StateView:
        assert self.number_line.state is not None
        current, target = self.number_line.state
        return StateView(draw_state(self.number_line.state), PROMPT, f"{current} to {target}")


class NumberLineTask(GameTask):
    """NumberLine task.

    An episode succeeds if its return is above 0, i.e. if it reaches the target without a penalty.
    """

    Options = NumberLineOptions

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        self.max_number = self.options.eval_max_number
        self.require_turns(MAX_STEPS, eval_max_steps=2 * self.max_number)

    def examples(self, split: str) -> list[Example]:
        """Return the examples of a split, one for each start state.

        By default, both splits contain all 30 start states, each with its exact probability. If
        task.options.eval_max_number is above 5, the eval split instead contains all start states
        with a current or target number above 5. These start states have equal probabilities.
        """
        if split == "eval" and self.max_number > MAX_NUMBER:
            pairs = product(range(self.max_number + 1), repeat=2)
            starts = [(current, target) for current, target in pairs if current != target and max(current, target) > MAX_NUMBER]
            return [make_example(state, max_number=self.max_number) for state in starts]
        return [make_example(state, probability=float(probability)) for state, probability in start_probabilities().items()]

    def env(self, example: Example) -> NumberLineEnv:
        """Return a new environment for one start state."""
        return NumberLineEnv(read_state(example.payload), options=self.options, max_number=example.payload.get("max_number", MAX_NUMBER))

    def demonstrations(self, split: str, *, num: int, seed: int) -> list[Demonstration]:
        """Return single-turn demonstrations from repeated shuffled passes over the 30 states.

        A larger `num` with the same seed returns the same demonstrations, followed by additional
        ones. The demonstrator always reads the numbers correctly. In the "correct" split, the
        demonstrator always takes the right action. In the "biased" split, the demonstrator takes
        the wrong action with probability BIASED_ERROR if the target is in BIASED_TARGETS. A policy
        with the same action probabilities as the "biased" demonstrator has a success rate of 63.9%
        (23/36) with greedy decoding and of 68.5% at temperature 1.
        """
        draw = random.Random(seed)
        shown = []
        deck: list[NumberLineState] = []
        for _ in range(num):
            deck = deck or draw.sample(STATES, len(STATES))
            state = deck.pop()
            wrong = draw.random() < mistake_probability(split, state)
            action = 1 - optimal_action(state) if wrong else optimal_action(state)
            reply = {"role": "assistant", "content": [{"type": "text", "text": write_reply(state, action)}]}
            shown.append(Demonstration(messages=[make_observation(state), reply]))
        return shown

    def gold_replies(self, example: Example) -> list[str]:
        """Return replies that earn the full reward, one per turn."""
        current, target = read_state(example.payload)
        step = 1 if current < target else -1
        return [write_reply((number, target), optimal_action((number, target))) for number in range(current, target, step)]
