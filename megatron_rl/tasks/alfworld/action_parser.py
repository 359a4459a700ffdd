"""Parsers that find the admissible command in the policy's reply.

If a reply contains no valid command, a parser returns the reason as an InvalidAction. The parsers
never raise an exception.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from megatron_rl.tasks.gym_cards.card_action_parser import MAX_REPLY_CHARS, InvalidAction, parse_json_action

TAIL_CHARS = 30
"""If a reply does not contain `"action":`, only its last TAIL_CHARS characters are searched."""


def parse_substring_action(text: str, commands: Sequence[str]) -> int | InvalidAction:
    """Return the index of the first entry of `commands` that occurs in the reply, as in RL4VLM.

    If the reply contains `"action":`, the text after the first `"action":` is searched. Otherwise,
    the last TAIL_CHARS characters are searched.

    Unlike in RL4VLM, the command `open cabinet 1` does not match the text `open cabinet 10`. In
    RL4VLM, a reply that names cabinet 10 opens cabinet 1 if the command `open cabinet 1` is
    admissible.
    """
    if len(text) > MAX_REPLY_CHARS:
        return InvalidAction.TOO_LONG
    lowered = text.lower()
    start = lowered.find('"action":')
    looked = lowered[-TAIL_CHARS:] if start < 0 else lowered[start:]
    for index, command in enumerate(commands):
        if command in looked and re.search(rf"{re.escape(command)}(?!\d)", looked, re.ASCII):
            return index
    return InvalidAction.NO_ACTION


ACTION_PARSERS: Mapping[str, Callable[[str, Sequence[str]], int | InvalidAction]] = {
    "json": parse_json_action,
    "rl4vlm": parse_substring_action,
}
"""Maps each value of task.options.reading to its parser."""
