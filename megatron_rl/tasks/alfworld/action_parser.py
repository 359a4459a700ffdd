"""From what the policy wrote to one of the admissible commands, or to the reason why it names none. Nothing here raises."""

import re
from collections.abc import Callable, Mapping, Sequence

from megatron_rl.tasks.gym_cards.action_parser import MAX_REPLY_CHARS, Invalid, read_json

TAIL = 30
"""RL4VLM looks at so many last characters where a reply has no action key."""


def read_substring(text: str, commands: Sequence[str]) -> int | Invalid:
    """RL4VLM's reading: the first of `commands` that stands behind the first "action": of the reply, or else in its last 30 characters.

    One thing is read better: cabinet 1 does not stand in cabinet 10. RL4VLM would open the former where the policy named the latter.
    """
    if len(text) > MAX_REPLY_CHARS:
        return Invalid.TOO_LONG
    lowered = text.lower()
    start = lowered.find('"action":')
    looked = lowered[-TAIL:] if start < 0 else lowered[start:]
    for index, command in enumerate(commands):
        if command in looked and re.search(rf"{re.escape(command)}(?!\d)", looked, re.ASCII):
            return index
    return Invalid.NO_ACTION


READINGS: Mapping[str, Callable[[str, Sequence[str]], int | Invalid]] = {"json": read_json, "rl4vlm": read_substring}
"""By task.options.reading."""
