"""Parses the tools of a transcript and the tool calls of its responses, in OpenAI's format.

The column `tools` of a row contains the tools, and an assistant message `tool_calls`. Both are
parsed by the same code as the requests of task=agent (tool_calls.py), so equal conversations have
equal tokens.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from megatron_rl.data.records import DataRecord
from megatron_rl.data.tool_calls import MAX_CALLS, MAX_TOOLS, CallInMessage, FunctionCall, ToolSchema, dump_tools, parse_calls

T = TypeVar("T")
_TOOLS, _CALLS = TypeAdapter(list[ToolSchema]), TypeAdapter(list[CallInMessage])
_FORMS = {
    "tools": '{"type": "function", "function": {"name": .., "description": .., "parameters": {..}}}',
    "tool_calls": '{"type": "function", "function": {"name": .., "arguments": {..}}}',
}


def read_tools(record: DataRecord, value: object, name: str) -> list[dict[str, Any]]:
    """Return the tools of a row; `value` is a list of tools, or JSON of one.

    Raises:
        ValueError: A tool is malformed, or two tools have the same name.
    """
    tools = dump_tools(_validate(record, value, name, _TOOLS, form="tools", max_num=MAX_TOOLS))
    _check_texts(record, tools, name)
    names = [tool["function"]["name"] for tool in tools]
    repeated = next((each for number, each in enumerate(names) if each in names[:number]), None)
    if repeated is not None:
        raise record.make_error(name, f"has two tools with the name {repeated}; keep one of them")
    return tools


def read_tool_calls(record: DataRecord, value: object, name: str) -> tuple[list[FunctionCall], list[str]]:
    """Return the calls of an assistant message, and their ids ("" for a call without one).

    Raises:
        ValueError: A call is malformed.
    """
    given = _validate(record, value, name, _CALLS, form="tool_calls", max_num=MAX_CALLS)
    try:
        calls = parse_calls(given)
    except ValueError as error:
        raise record.make_error(name, f"{error}; write an object, or JSON of one") from error
    _check_texts(record, [call.arguments for call in calls], name)
    return calls, [call.id or "" for call in given]


def _validate(
    record: DataRecord, value: object, name: str, schema: TypeAdapter[list[T]], *, form: str, max_num: int
) -> list[T]:  # fmt: skip
    """Return the parsed items; raise ValueError with the place of the first mistake."""
    remedy = f"write a list of {_FORMS[form]}"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise record.make_error(name, f"is text that is not valid JSON ({error}); {remedy}") from error
    items = record.require_list(value, name)
    if len(items) > max_num:
        raise record.make_error(name, f"has {len(items)} items; at most {max_num} are allowed")
    try:
        return schema.validate_python(items)
    except ValidationError as error:
        mistake = error.errors(include_url=False, include_input=False, include_context=False)[0]
        number, *keys = mistake["loc"]
        place = "".join(f".{key}" for key in keys if key not in ("str", "dict[str,any]"))
        raise record.make_error(f"{name}[{number}]{place[:100]}", f"{mistake['msg'][:200]}; {remedy}") from error


def _check_texts(record: DataRecord, value: object, name: str) -> None:
    """Raise ValueError if a text in a JSON value is not accepted by a tokenizer."""
    if isinstance(value, str):
        record.require_text(value, name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            record.require_text(key, name)
            _check_texts(record, item, name)
    elif isinstance(value, Sequence):
        for item in value:
            _check_texts(record, item, name)
