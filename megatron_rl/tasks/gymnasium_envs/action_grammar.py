"""Format of the actions of a space: description for the prompt, parser and random actions.

The reply is one JSON object, of which the value of "action" is the action:

    Discrete, with names       {"thoughts": "The door is ahead.", "action": "forward"}
    Discrete, without names    {"action": 2}
    MultiDiscrete              {"action": [2, 0]}
    Box                        {"action": [0.5, -1]}
    Text                       {"action": "click 40 80"}

With task.options.reply=tags, the reply has thoughts and up to task.options.actions_per_turn actions
of a Discrete space:

    <think>The door is ahead.</think><answer>forward, forward</answer>

The parsers never raise an exception.
"""

import random
import re
from dataclasses import dataclass
from itertools import starmap
from typing import Any

from megatron_rl.tasks.gym_cards.card_action_parser import MAX_REPLY_CHARS, InvalidAction, parse_json_object

Action = list[int] | list[float] | list[str]
"""Numbers of an action: one for a Discrete space, otherwise the flattened array. For a Text space,
a list with the text.
"""
TAGS = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)


@dataclass(slots=True, frozen=True, kw_only=True)
class ActionGrammar:
    """Bounds of the numbers of an action, and names of the actions of a Discrete space.

    For a Text space, the bounds are those of the number of characters.

    Example: ActionGrammar(low=[0], high=[2], is_integer=True, names=["left", "right", "forward"])
    reads the reply {"action": "right"} as the action [1].
    """

    low: list[int] | list[float]
    high: list[int] | list[float]
    is_integer: bool
    is_list: bool = False
    """True if an action is written as a list. A list with one number may also be that number."""
    names: list[str]
    characters: str = ""
    """Characters that a text may contain; empty if actions are not texts."""

    def parse(self, text: str) -> Action | InvalidAction:
        """Return the action in a reply, or the reason why the reply has no valid action."""
        read = parse_json_object(text)
        if isinstance(read, InvalidAction):
            return read
        if "action" not in read:
            return InvalidAction.NO_ACTION
        if self.characters:
            return self._check_text(read["action"])
        if self.names:
            return self._find_name(read["action"])
        return self._check(read["action"] if isinstance(read["action"], list) and self.is_list else [read["action"]])

    def parse_tags(self, text: str, *, max_actions: int) -> list[Action] | InvalidAction:
        """Return the actions in a reply with tags, or the reason why the reply is invalid.

        Actions after the first `max_actions` are ignored. If one of the others is invalid, so is
        the reply. Each tag must occur once.
        """
        if len(text) > MAX_REPLY_CHARS:
            return InvalidAction.TOO_LONG
        found = TAGS.fullmatch(text)
        if found is None or len(re.findall(r"</?(?:think|answer)>", text)) != 4:
            return InvalidAction.WRONG_TAGS
        actions: list[Action] = []
        for word in list(filter(None, map(str.strip, found[2].split(","))))[:max_actions]:
            is_number = re.fullmatch(r"-?\d{1,9}", word, re.ASCII)
            action = self._find_name(word) if self.names else self._check([int(word) if is_number else word])
            if isinstance(action, InvalidAction):
                return action
            actions.append(action)
        return actions or InvalidAction.NO_ACTION

    def _find_name(self, name: object) -> Action | InvalidAction:
        return [int(self.low[0]) + self.names.index(name)] if isinstance(name, str) and name in self.names else InvalidAction.NO_ACTION

    def _check_text(self, text: object) -> Action | InvalidAction:
        if not isinstance(text, str):
            return InvalidAction.NO_ACTION
        if not self.low[0] <= len(text) <= self.high[0]:
            return InvalidAction.WRONG_LENGTH
        return [text] if {*text} <= {*self.characters} else InvalidAction.OUT_OF_BOUNDS

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
        """Return a uniformly random action; for texts, the length is uniformly random as well."""
        if self.characters:
            return ["".join(rng.choices(self.characters, k=rng.randint(int(self.low[0]), int(self.high[0]))))]
        draw = rng.randint if self.is_integer else rng.uniform
        return list(starmap(draw, zip(self.low, self.high, strict=True)))

    def format_action(self, action: Action) -> str:
        """Return the action as it is written in a reply."""
        if self.characters:
            return str(action[0])
        if self.names:
            return self.names[int(action[0]) - int(self.low[0])]
        numbers = [f"{value:.6g}" for value in action]
        return f"[{', '.join(numbers)}]" if self.is_list else numbers[0]

    def describe(self) -> str:
        """Return the format of an action for the prompt.

        Examples: `"left", "right" or "forward"`; `integer from 0 to 3`; `[number from -1 to 1,
        number from 0 to 1]`; `text of 1 to 99 characters`.
        """
        if self.characters:
            return f"text of {self.low[0]} to {self.high[0]} characters"
        if self.names:
            quoted = [f'"{name}"' for name in self.names]
            return " or ".join(filter(None, (", ".join(quoted[:-1]), quoted[-1])))
        kind = "integer" if self.is_integer else "number"
        numbers = [f"{kind} from {low:.6g} to {high:.6g}" for low, high in zip(self.low, self.high, strict=True)]
        return f"[{', '.join(numbers)}]" if self.is_list else numbers[0]
