"""What the policy is told of a state, and what it should say: the prompt, and a demonstrator's reply.

{"thoughts": "Next: heat apple 1 with microwave 1.", "action": "go to microwave 1"}
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

NEUTRAL_COMMANDS = ("go ", "open ", "close ", "examine ", "look", "inventory", "help")
"""Commands that change nothing that a goal asks for begin with these; all others are deeds."""


@dataclass(slots=True, frozen=True)
class GameObservation:
    """What a game shows after a command."""

    text: str
    commands: list[str]
    """Those that are admissible, sorted."""
    is_won: bool
    num_met: int
    """Goal conditions that hold..."""
    num_conditions: int
    """...of so many."""


def write_prompt(task: str, observation: GameObservation, *, history: Sequence[str] = (), has_text: bool = True) -> str:
    """`history` are commands that were played; without the text only the picture tells what is seen."""
    lines = [
        f"Household. Task: {task}.",
        *([f"You see: {observation.text}"] if has_text else []),
        *([f"Before: {'; '.join(history)}."] if history else []),
        f"Actions: {'; '.join(observation.commands)}.",
        'Answer with one JSON object: {"thoughts": text, "action": one of the actions}',
    ]
    return "\n".join(lines)


def write_thoughts(commands: Sequence[str]) -> str:
    """What is on the mind of one who is about to give these commands: the first deed among them."""
    deed = next((command for command in commands if not command.startswith(NEUTRAL_COMMANDS)), commands[0])
    return f"Next: {deed}."


def write_reply(thoughts: str, command: str) -> str:
    return json.dumps({"thoughts": thoughts, "action": command})
