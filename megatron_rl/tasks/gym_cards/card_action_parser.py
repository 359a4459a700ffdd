"""Parsers from the policy's reply to an action, or to the reason why it has none.

They never raise, and nothing in a reply is run as code.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

MAX_REPLY_CHARS = 4096
"""Maximum length of a reply that is parsed. No valid reply is longer, and the limit bounds the
nesting depth in the JSON parser.
"""


class InvalidAction(StrEnum):
    """Reason why a reply has no action."""

    TOO_LONG = "too long"
    NOT_JSON = "not JSON"
    NOT_AN_OBJECT = "not an object"
    REPEATED_KEY = "repeated key"
    NO_ACTION = "no action"
    SEVERAL_ACTIONS = "several actions"


class _RepeatedJsonKey(ValueError):
    pass


def _reject_repeated_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    read = dict(pairs)
    if len(read) < len(pairs):
        raise _RepeatedJsonKey
    return read


def _reject_constant(constant: str) -> float:
    raise ValueError(f"{constant} is Python, not JSON")


def parse_json_action(text: str, actions: Sequence[str]) -> int | InvalidAction:
    """Return the index into `actions` that a reply names, or why it names none.

    A valid reply is one JSON object (RFC 8259, so no NaN), with nothing but whitespace around it,
    no repeated key, and a value of "action" that is exactly one of `actions`. Other keys are
    ignored: only the action is rewarded, not the policy's description of the state.
    """
    if len(text) > MAX_REPLY_CHARS:
        return InvalidAction.TOO_LONG
    try:
        read = json.loads(text, object_pairs_hook=_reject_repeated_keys, parse_constant=_reject_constant)
    except _RepeatedJsonKey:
        return InvalidAction.REPEATED_KEY
    except (ValueError, RecursionError):  # malformed, or an integer beyond Python's digit limit; nested too deep
        return InvalidAction.NOT_JSON
    if not isinstance(read, dict):
        return InvalidAction.NOT_AN_OBJECT
    if read.get("action") not in actions:
        return InvalidAction.NO_ACTION
    return actions.index(read["action"])


def parse_named_action(text: str, actions: Sequence[str]) -> int | InvalidAction:
    """Return the index of the only action that a free-text reply names, as RL4VLM does.

    The text after the first `"action"` is searched, or all of the text if there is none. The search
    ignores case and matches whole numbers and words: 10 does not match 1, and white does not match
    hit. Naming the same action twice is valid.
    """
    if len(text) > MAX_REPLY_CHARS:
        return InvalidAction.TOO_LONG
    before, key, behind = text.lower().partition('"action"')
    named = {*re.findall(r"\w+|[^\w\s]", behind if key else before)} & {*actions}
    if len(named) != 1:
        return InvalidAction.SEVERAL_ACTIONS if named else InvalidAction.NO_ACTION
    return actions.index(named.pop())


def find_action_start(text: str) -> int | None:
    """Return the position of the last `"action"` in the reply, or None.

    The action begins there, after the thoughts. RL4VLM finds the same place by token ids.
    """
    return max((found.start() for found in re.finditer('"action"', text, re.ASCII | re.IGNORECASE)), default=None)


ACTION_PARSERS: Mapping[str, Callable[[str, Sequence[str]], int | InvalidAction]] = {
    "json": parse_json_action,
    "rl4vlm": parse_named_action,
}
"""Maps task.options.reading to its parser."""
