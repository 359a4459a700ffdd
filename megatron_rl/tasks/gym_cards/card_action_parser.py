"""Parsers that find the action in the policy's reply.

If a reply contains no valid action, a parser returns the reason as an InvalidAction. The parsers
never raise an exception and never execute text from a reply.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

MAX_REPLY_CHARS = 4096
"""Maximum length of a reply in characters; a longer reply is invalid. The limit also bounds the
nesting depth of the parsed JSON.
"""


class InvalidAction(StrEnum):
    """Reason why a reply contains no valid action."""

    TOO_LONG = "too long"
    NOT_JSON = "not JSON"
    NOT_AN_OBJECT = "not an object"
    REPEATED_KEY = "repeated key"
    NO_ACTION = "no action"
    SEVERAL_ACTIONS = "several actions"
    WRONG_LENGTH = "wrong number of values"
    NOT_A_NUMBER = "not a number"
    OUT_OF_BOUNDS = "out of bounds"
    WRONG_TAGS = "not <think>...</think><answer>...</answer>"


class _RepeatedJsonKey(ValueError):
    pass


def _reject_repeated_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    read = dict(pairs)
    if len(read) < len(pairs):
        raise _RepeatedJsonKey
    return read


def _reject_constant(constant: str) -> float:
    raise ValueError(f"{constant} is a Python constant and is not valid JSON")


def parse_json_object(text: str) -> dict[str, Any] | InvalidAction:
    """Return the JSON object that is the whole reply, or the reason why the reply is invalid.

    The object has no repeated keys and is surrounded only by whitespace. NaN is invalid, as in RFC
    8259.
    """
    if len(text) > MAX_REPLY_CHARS:
        return InvalidAction.TOO_LONG
    try:
        read = json.loads(text, object_pairs_hook=_reject_repeated_keys, parse_constant=_reject_constant)
    except _RepeatedJsonKey:
        return InvalidAction.REPEATED_KEY
    except (ValueError, RecursionError):  # invalid JSON, an integer beyond Python's digit limit, or too deep nesting
        return InvalidAction.NOT_JSON
    return read if isinstance(read, dict) else InvalidAction.NOT_AN_OBJECT


def parse_json_action(text: str, actions: Sequence[str]) -> int | InvalidAction:
    """Return the index of the reply's action in `actions`, or the reason why the reply is invalid.

    A valid reply is one JSON object (`parse_json_object`). The value of the object's key "action"
    must be equal to one of `actions`. Other keys are ignored, so the policy's description of the
    state does not affect the reward.
    """
    read = parse_json_object(text)
    if isinstance(read, InvalidAction):
        return read
    if read.get("action") not in actions:
        return InvalidAction.NO_ACTION
    return actions.index(read["action"])


def parse_named_action(text: str, actions: Sequence[str]) -> int | InvalidAction:
    """Return the index of the only action in a free-text reply, following the rules of RL4VLM.

    The search covers the text after the first `"action"`, or the whole reply if it does not contain
    `"action"`. The search ignores case and matches only whole numbers and words: the action 1 does
    not match 10, and the action hit does not match white. A reply may repeat the same action.
    """
    if len(text) > MAX_REPLY_CHARS:
        return InvalidAction.TOO_LONG
    before, key, behind = text.lower().partition('"action"')
    named = {*re.findall(r"\w+|[^\w\s]", behind if key else before)} & {*actions}
    if len(named) != 1:
        return InvalidAction.SEVERAL_ACTIONS if named else InvalidAction.NO_ACTION
    return actions.index(named.pop())


def find_action_start(text: str) -> int | None:
    """Return the character index of the last `"action"` in the reply, or None if not found.

    The thoughts end and the action begins at this index. RL4VLM finds this position by searching
    the token ids instead of the text.
    """
    return max((found.start() for found in re.finditer('"action"', text, re.ASCII | re.IGNORECASE)), default=None)


ACTION_PARSERS: Mapping[str, Callable[[str, Sequence[str]], int | InvalidAction]] = {
    "json": parse_json_action,
    "rl4vlm": parse_named_action,
}
"""Maps each value of task.options.reading to its parser."""
