"""Format of the actions of a space: description for the prompt, parser and random actions.

The reply is one JSON object, of which the value of "action" is the action:

    Discrete, with names       {"thoughts": "The door is ahead.", "action": "forward"}
    Discrete, without names    {"action": 2}
    MultiDiscrete              {"action": [2, 0]}
    Box                        {"action": [0.5, -1]}

The parser never raises an exception.
"""

import random
from dataclasses import dataclass
from itertools import starmap
from typing import Any

from megatron_rl.tasks.gym_cards.card_action_parser import InvalidAction, parse_json_object

Action = list[int] | list[float]
"""Numbers of an action: one for a Discrete space, otherwise the flattened array."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ActionGrammar:
    """Bounds of the numbers of an action, and names of the actions of a Discrete space.

    Example: ActionGrammar(low=[0], high=[2], is_integer=True, names=["left", "right", "forward"])
    reads the reply {"action": "right"} as the action [1].
    """

    low: Action
    high: Action
    is_integer: bool
    is_list: bool = False
    """True if an action is written as a list. A list with one number may also be that number."""
    names: list[str]

    def parse(self, text: str) -> Action | InvalidAction:
        """Return the action in a reply, or the reason why the reply has no valid action."""
        read = parse_json_object(text)
        if isinstance(read, InvalidAction):
            return read
        if "action" not in read:
            return InvalidAction.NO_ACTION
        if self.names:
            return [int(self.low[0]) + self.names.index(read["action"])] if read["action"] in self.names else InvalidAction.NO_ACTION
        return self._check(read["action"] if isinstance(read["action"], list) and self.is_list else [read["action"]])

    def _check(self, values: list[Any]) -> Action | InvalidAction:
        if len(values) != len(self.low):
            return InvalidAction.WRONG_LENGTH
        if not all(self._is_number(value) for value in values):
            return InvalidAction.NOT_A_NUMBER
        if not all(low <= value <= high for value, low, high in zip(values, self.low, self.high, strict=True)):
            return InvalidAction.OUT_OF_BOUNDS
        return values if self.is_integer else [float(value) for value in values]

    def _is_number(self, value: object) -> bool:
        """Return True for a number of JSON; True and False are instances of int in Python."""
        return isinstance(value, int if self.is_integer else int | float) and not isinstance(value, bool)

    def sample(self, rng: random.Random) -> Action:
        """Return a uniformly random action."""
        draw = rng.randint if self.is_integer else rng.uniform
        return list(starmap(draw, zip(self.low, self.high, strict=True)))

    def format_action(self, action: Action) -> str:
        """Return the action as it is written in a reply."""
        if self.names:
            return self.names[int(action[0]) - int(self.low[0])]
        numbers = [f"{value:.6g}" for value in action]
        return f"[{', '.join(numbers)}]" if self.is_list else numbers[0]

    def describe(self) -> str:
        """Return the format of an action for the prompt.

        Examples: `"left", "right" or "forward"`; `integer from 0 to 3`; `[number from -1 to 1,
        number from 0 to 1]`.
        """
        if self.names:
            quoted = [f'"{name}"' for name in self.names]
            return " or ".join(filter(None, (", ".join(quoted[:-1]), quoted[-1])))
        kind = "integer" if self.is_integer else "number"
        numbers = [f"{kind} from {low:.6g} to {high:.6g}" for low, high in zip(self.low, self.high, strict=True)]
        return f"[{', '.join(numbers)}]" if self.is_list else numbers[0]
