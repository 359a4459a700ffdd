"""Parsers from the policy's reply to an admissible command, or to the reason why it has none.

They never raise.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from megatron_rl.tasks.gym_cards.card_action_parser import MAX_REPLY_CHARS, InvalidAction, parse_json_action

TAIL_CHARS = 30
"""Number of characters at the end of a reply that RL4VLM searches if the reply has no action key.
"""


def parse_substring_action(text: str, commands: Sequence[str]) -> int | InvalidAction:
    """Return the index of the first of `commands` that occurs in the reply, as RL4VLM does.

    The text from the first `"action":` on is searched, or the last 30 characters if there is none.
    One difference: cabinet 1 does not match cabinet 10. RL4VLM would open the former if the policy
    named the latter.
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
"""Maps task.options.reading to its parser."""
