"""Extracts the fields of an example that are recorded with each of its rollouts.

The fields are the question, the reference answer, and the additional fields in `extra`.
"""

from collections.abc import Mapping
from typing import TypedDict

from megatron_rl.io.jsonl import to_json_line

MAX_CHARACTERS = 4000
"""Maximum length in characters of a text in `extra`; a longer text is truncated, and its full
length is appended.
"""
MAX_DEPTH = 16
"""Maximum nesting depth of `extra`; deeper lists and mappings are replaced by '...'."""


class ExampleFields(TypedDict):
    """Fields of an example that are recorded with its rollouts."""

    question: str
    answer: str
    extra: str


def example_fields(payload: Mapping[str, object]) -> ExampleFields:
    """Return `question`, `answer` and `extra` of an example's payload as strings.

    A field that the payload lacks becomes an empty string. `extra` is the payload's `extra` mapping
    as JSON text, without values that JSON cannot represent, such as bytes and images.

    Example: {"question": "How many?", "answer": 4, "extra": {"index": 7, "image": b"PNG..."}}
    returns {"question": "How many?", "answer": "4", "extra": '{"index": 7}'}.
    """
    extra = payload.get("extra")
    kept = _json_fields(extra, depth=0) if isinstance(extra, Mapping) else {}
    question, answer = _text(payload.get("question")), _text(payload.get("answer"))
    return {"question": question, "answer": answer, "extra": to_json_line(kept) if kept else ""}


def _text(value: object) -> str:
    return str(value) if isinstance(value, str | int | float) else ""


def _json_fields(fields: Mapping[object, object], *, depth: int) -> dict[str, object]:
    values = {str(name): _json_value(value, depth=depth) for name, value in fields.items() if _is_json(value)}
    return {name: value for name, value in values.items() if value not in ({}, [])}


def _json_value(value: object, *, depth: int) -> object:
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        return f"{value[:MAX_CHARACTERS]}... ({len(value)} characters)"
    if depth >= MAX_DEPTH and isinstance(value, Mapping | list | tuple):
        return "..."
    if isinstance(value, Mapping):
        return _json_fields(value, depth=depth + 1)
    if isinstance(value, list | tuple):
        return [_json_value(each, depth=depth + 1) for each in value if _is_json(each)]
    return value


def _is_json(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool | Mapping | list | tuple)
