"""Prompt of a state, and a demonstrator's reply.

Example of a reply:

    {"thoughts": "Next: heat apple 1 with microwave 1.", "action": "go to microwave 1"}
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

NEUTRAL_COMMANDS = ("go ", "open ", "close ", "examine ", "look", "inventory", "help")
"""Prefixes of commands that change nothing that a goal requires."""


@dataclass(slots=True, frozen=True)
class GameObservation:
    """Result of a command."""

    text: str
    commands: list[str]
    """Admissible commands, sorted."""
    is_won: bool
    num_met: int
    """Number of goal conditions that hold."""
    num_conditions: int
    """Number of goal conditions."""


def write_prompt(task: str, observation: GameObservation, *, history: Sequence[str] = (), has_text: bool = True) -> str:
    """Return the prompt of a state.

    Args:
        task: Text of the task.
        observation: Current observation.
        history: Previous commands to list.
        has_text: Include the observation text. Without it, the observation is in the image only.
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
    """Return thoughts that name the first of these commands that changes the state."""
    deed = next((command for command in commands if not command.startswith(NEUTRAL_COMMANDS)), commands[0])
    return f"Next: {deed}."


def write_reply(thoughts: str, command: str) -> str:
    """Return a reply with thoughts and a command."""
    return json.dumps({"thoughts": thoughts, "action": command})
