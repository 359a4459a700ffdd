r"""Tool calls in responses of the policy, in the messages of requests and in transcripts.

A response contains calls in the form of the chat templates of Qwen2.5 and Qwen3-VL:

    <tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>

The agent receives and returns them in the format of OpenAI's API. Both are parsed to the same
records, so a message that returns a response is recognized however its JSON is written.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field

BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
NAME_PATTERN = r"^[a-zA-Z0-9_.:-]{1,128}$"
MAX_TOOLS, MAX_CALLS = 128, 128
"""Maximum number of tools in a request, and of calls in a message."""


class FunctionSchema(BaseModel):
    """Function that the policy may call."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSchema(BaseModel):
    """Tool of a request."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["function"]
    function: FunctionSchema


class CalledFunction(BaseModel):
    """Function and arguments of a call."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(pattern=NAME_PATTERN)
    arguments: str | dict[str, Any]
    """Arguments as an object, or as an object in JSON."""


class CallInMessage(BaseModel):
    """Call in an assistant message of a request."""

    model_config = ConfigDict(extra="forbid")
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction


@dataclass(slots=True, frozen=True)
class FunctionCall:
    """Parsed call."""

    name: str
    arguments: Mapping[str, object]

    def to_message(self) -> dict[str, object]:
        """Return the call in the form that chat templates render."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    @property
    def key(self) -> str:
        """JSON that is equal for equal calls."""
        return json.dumps([self.name, self.arguments], sort_keys=True)


@dataclass(slots=True, frozen=True)
class ParsedResponse:
    """Text and calls of a response."""

    content: str
    calls: tuple[FunctionCall, ...] = ()


def dump_tools(tools: Sequence[ToolSchema]) -> list[dict[str, Any]]:
    """Return tools in the form that chat templates render, with the keys in the order of OpenAI."""
    return [tool.model_dump(exclude_unset=True) for tool in tools]


def parse_response(text: str) -> ParsedResponse:
    """Split a response into the text before its first call, and its calls.

    If a call is malformed, the whole response is text, as in vLLM's parser for this form.
    """
    bodies = BLOCK.findall(text)
    if not bodies or len(bodies) > MAX_CALLS:
        return ParsedResponse(text)
    calls = []
    for body in bodies:
        read = _read_object(body)
        if read is None or not isinstance(read.get("name"), str) or not re.match(NAME_PATTERN, read["name"]):
            return ParsedResponse(text)
        arguments = read.get("arguments")
        if not isinstance(arguments, dict):
            return ParsedResponse(text)
        calls.append(FunctionCall(read["name"], arguments))
    return ParsedResponse(text[: text.index("<tool_call>")].rstrip(), tuple(calls))


def parse_calls(calls: Sequence[CallInMessage]) -> list[FunctionCall]:
    """Return the calls of an assistant message of a request or a transcript.

    Raises:
        ValueError: The arguments of a call are not an object.
    """
    found = []
    for call in calls:
        given = call.function.arguments
        arguments = _read_object(given or "{}") if isinstance(given, str) else given
        if arguments is None:
            raise ValueError(f"the arguments of {call.function.name} are not a JSON object: {given!r:.80}")
        found.append(FunctionCall(call.function.name, arguments))
    return found


def _read_object(text: str) -> dict[str, Any] | None:
    """Return a JSON object; None if the text is something else, or cannot be stored as UTF-8."""
    try:
        read = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(read, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # no JSON, an integer beyond Python's digit limit, deep nesting, or a lone surrogate
        return None
    return read if isinstance(read, dict) else None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
