"""NumberLine as a task: what the policy is shown, how its reply becomes an action, and the demonstrations of the warm start.

The policy is told the rules and shown the picture, and replies with one JSON object, e.g.
    {"current number": 2, "target number": 5, "thoughts": "Raise it.", "action": "+"}
The picture is the whole state, so every turn is a new context: one user message with the picture and the prompt.

An invalid reply costs what a wrong move costs (-1), leaves the state where it is and uses up a turn, unless task.options say otherwise
(game.py).
"""

import json
import random
from collections.abc import Mapping
from itertools import product

from megatron_rl.config import TaskSettings, require_choice
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
from megatron_rl.tasks.task_options import GameOptions, NumberLineOptions
from megatron_rl.types import Demonstration, Example, Message

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


def write_reply(state: NumberLineState, action: int) -> str:
    """The reply that reads the state right and takes the action."""
    current, target = state
    return json.dumps({"current number": current, "target number": target, "thoughts": THOUGHTS[action], "action": ACTIONS[action]})


def make_observation(state: NumberLineState) -> Message:
    """What the user says in a state: the picture and the prompt."""
    return make_user_message(draw_state(state), PROMPT)


def mistake_probability(split: str, state: NumberLineState) -> float:
    """How often the demonstrator of a split takes the wrong action in a state."""
    require_choice("sft.splits", split, ("correct", "biased"))
    return BIASED_ERROR if split == "biased" and state[1] in BIASED_TARGETS else 0.0


def make_example(state: NumberLineState, *, probability: float | None = None, max_number: int | None = None) -> Example:
    current, target = state
    payload = {"current": current, "target": target} | ({} if max_number is None else {"max_number": max_number})
    return Example(id=f"current{current}_target{target}", payload=payload, probability=probability)


def read_state(payload: Mapping[str, object]) -> NumberLineState:
    current, target = payload["current"], payload["target"]
    assert isinstance(current, int) and isinstance(target, int), f"payload {dict(payload)}"
    return current, target


class NumberLineEnv(GameEnv):
    """One episode from this start."""

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
    """NumberLine for the trainer. An episode succeeds when its return is above 0: at the goal, and no wrong move on the way."""

    Options = NumberLineOptions

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        self.max_number = self.options.eval_max_number
        self.require_turns(MAX_STEPS, eval_max_steps=2 * self.max_number)

    def examples(self, split: str) -> list[Example]:
        """The 30 starts, each with its exact probability. There are no others, so every split is the same: train is test.

        With task.options.eval_max_number split eval has the starts of that line that have a number beyond 5, equally likely.
        """
        if split == "eval" and self.max_number > MAX_NUMBER:
            pairs = product(range(self.max_number + 1), repeat=2)
            starts = [(current, target) for current, target in pairs if current != target and max(current, target) > MAX_NUMBER]
            return [make_example(state, max_number=self.max_number) for state in starts]
        return [make_example(state, probability=float(probability)) for state, probability in start_probabilities().items()]

    def env(self, example: Example) -> NumberLineEnv:
        return NumberLineEnv(read_state(example.payload), options=self.options, max_number=example.payload.get("max_number", MAX_NUMBER))

    def demonstrations(self, split: str, *, num: int, seed: int) -> list[Demonstration]:
        """Single turns in the 30 states, dealt in shuffled rounds of all 30; the numbers are always read right. Fewer are a prefix of more.

        split "correct" always goes the right way; "biased" goes the wrong way with probability BIASED_ERROR where the target is in
        BIASED_TARGETS. A policy that has learned it wins 23/36 (63.9%) of the episodes when greedy, 68.5% at temperature 1.
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
        """Replies that earn full marks, turn by turn."""
        current, target = read_state(example.payload)
        step = 1 if current < target else -1
        return [write_reply((number, target), optimal_action((number, target))) for number in range(current, target, step)]
