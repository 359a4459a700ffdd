"""From what the policy wrote to one of the admissible commands, or to the reason why it names none. Nothing here raises."""

import re
from collections.abc import Callable, Mapping, Sequence

from megatron_rl.tasks.gym_cards.action_parser import MAX_REPLY_CHARS, InvalidAction, parse_json_action

TAIL_CHARS = 30
"""RL4VLM looks at so many last characters where a reply has no action key."""


def parse_substring_action(text: str, commands: Sequence[str]) -> int | InvalidAction:
    """RL4VLM's reading: the first of `commands` that stands behind the first "action": of the reply, or else in its last 30 characters.

    One thing is read better: cabinet 1 does not stand in cabinet 10. RL4VLM would open the former where the policy named the latter.
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
"""By task.options.reading."""
