"""Formats the prompts for game states and the replies of demonstrators.

A reply looks like this:

    {"thoughts": "Next: heat apple 1 with microwave 1.", "action": "go to microwave 1"}
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

NEUTRAL_COMMANDS = ("go ", "open ", "close ", "examine ", "look", "inventory", "help")
"""Prefixes of commands that do not affect any condition of a goal."""


@dataclass(slots=True, frozen=True)
class GameObservation:
    """Observation after a command, or at the start of a game."""

    text: str
    commands: list[str]
    """Admissible commands, sorted."""
    is_won: bool
    num_met: int
    """Number of the goal's conditions that are met."""
    num_conditions: int
    """Total number of the goal's conditions."""


def write_prompt(task: str, observation: GameObservation, *, history: Sequence[str] = (), has_text: bool = True) -> str:
    """Return the prompt for a state.

    Args:
        task: Text of the task.
        observation: Current observation.
        history: Previous commands to list.
        has_text: If True, the prompt contains the observation text. If False, only the image
            contains the observation.
    """
    lines = [
        f"Household. Task: {task}.",
        *([f"You see: {observation.text}"] if has_text else []),
        *([f"Before: {'; '.join(history)}."] if history else []),
        f"Actions: {'; '.join(observation.commands)}.",
        'Answer with one JSON object: {"thoughts": text, "action": one of the actions}',
    ]
    return "\n".join(lines)


def write_thoughts(commands: Sequence[str]) -> str:
    """Return the `thoughts` text of a reply, which names the first command relevant to the goal.

    If no command is relevant to the goal, the text names the first entry of `commands`.
    """
    deed = next((command for command in commands if not command.startswith(NEUTRAL_COMMANDS)), commands[0])
    return f"Next: {deed}."


def write_reply(thoughts: str, command: str) -> str:
    """Return a reply with the given thoughts and command."""
    return json.dumps({"thoughts": thoughts, "action": command})
