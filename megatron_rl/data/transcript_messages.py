"""Parses the keys and roles of transcript messages, and detects responses that are masked.

Each key of a message is read, ignored or rejected; only keys without an effect are ignored.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.data.chat_prompt import parse_messages
from megatron_rl.data.images import shorten
from megatron_rl.data.records import DataRecord
from megatron_rl.data.tool_calls import FunctionCall
from megatron_rl.data.transcript_tools import read_tool_calls

ROLES = {name: name for name in ("system", "user", "tool", "assistant")} | {"human": "user", "observation": "tool", "gpt": "assistant"}
"""Maps a role in the file to the role in the chat template.

The roles human, observation and gpt are used by ShareGPT and LLaMA-Factory.
"""
ROLE_CONTENT_KEYS = (("role", "content"), ("from", "value"))
"""Pairs of keys for role and content: the keys of OpenAI, then the keys of ShareGPT."""
LOSS_FLAGS = ("loss", "weight", "trainable", "train", "training", "loss_mask", "loss_scale")
"""Keys that control training on a response; 0 or false masks the response's labels."""
IGNORED_KEYS = (
    "id", "message_id", "parent_id", "uuid", "timestamp", "created", "created_at", "date", "time", "index", "turn", "turn_id",
    "tool_call_id",
)  # fmt: skip
"""Keys that do not affect what the policy reads or learns.

These keys are ignored only if their value is text, a number or a time.
"""
_CALL = 'is not read; write tool_calls: [{"type": "function", "function": ..}], and remove this key'
_TOOLS = "is not read; write the tools into the column tools of the row, and remove this key"
_REASONING = (
    "is not read; write the reasoning into the content where the assistant should generate it (as <think>..</think>), and remove this key"
)
_PICTURES = "is not read; name the images in the row's column images or in parts of the content"
_CLIP = "is not read: transcripts contain only text and images; remove the row"
REFUSED_KEYS = {
    "function_call": _CALL,
    **dict.fromkeys(("tools", "functions"), _TOOLS),
    "tool_calls": "are in a message of another role, but only the assistant calls tools; remove this key",
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking", "thought"), _REASONING),
    **dict.fromkeys(("image", "images", "image_path", "image_paths", "img", "image_url", "objects"), _PICTURES),
    **dict.fromkeys(("video", "videos", "audio", "audios"), _CLIP),
    "mask": "may mean that the message is trained or that it is masked; write loss: true or loss: false",
    "name": "is not read, and the chat template writes no names; put it into the content, or remove this key",
    "prefix": "is not read; write the whole response into the content, and remove this key",
}
"""Maps a rejected key to its error message; keys that this module does not list are rejected too.
"""
_UNKNOWN = f"is unknown; a message has role and content (or from and value), and {', '.join(LOSS_FLAGS)} mask a response"


@dataclass(slots=True, frozen=True)
class RawMessage:
    """A message as stored in a row.

    Example: {"from": "gpt", "value": "Red.", "loss": 0} as the second message of the column
    conversations becomes RawMessage("conversations[1]", "assistant", "Red.", is_learned=False).
    """

    location: str
    """Location of the message in the row, used in error messages."""
    role: str
    """Role of the message, one of the values of ROLES."""
    content: object
    is_learned: bool = True
    """False if the labels of this response are masked."""
    calls: Sequence[FunctionCall] = ()
    """Tool calls of an assistant message."""
    call_ids: Sequence[str] = ()
    """Id of each call, or of the call that a tool message is the result of; "" if it has none."""


def read_messages(record: DataRecord, column: str, *, is_learned: bool = True) -> list[RawMessage]:
    """Return the messages in a column.

    `is_learned` is the default for responses without a key in LOSS_FLAGS.
    """
    given = parse_messages(record, record.row[column], column)
    if not isinstance(given, list):
        raise record.make_error(column, f"must be a list of messages with role and content (or from and value), not {type(given).__name__}")
    return [_read_message(record, message, f"{column}[{number}]", is_learned=is_learned) for number, message in enumerate(given)]


def is_empty(value: object) -> bool:
    """Return True for a value without content.

    Empty values occur in file formats in which all rows have the same columns. The values False and
    0 count as content.
    """
    return value in ("", "[]", "{}", [], {})


def _read_message(record: DataRecord, value: object, field: str, *, is_learned: bool) -> RawMessage:
    message = record.require_mapping(value, field)
    pairs = [pair for pair in ROLE_CONTENT_KEYS if any(key in message for key in pair)]
    if len(pairs) > 1:
        raise record.make_error(field, "mixes the keys role and content with the keys from and value; keep one of the two pairs")
    role_key, content_key = pairs[0] if pairs else ROLE_CONTENT_KEYS[0]
    role = message.get(role_key)
    known_role = ROLES.get(role, "") if isinstance(role, str) else ""
    calls_key = "tool_calls" if known_role == "assistant" else ""
    for key, held in message.items():
        is_name_of_tool = key == "name" and known_role == "tool"
        is_ignored = key in IGNORED_KEYS and not isinstance(held, bool | list | Mapping)
        is_read = key in (role_key, content_key, calls_key, *LOSS_FLAGS) or is_name_of_tool
        if is_read or is_ignored or is_empty(held) or (key == "prefix" and held is False):
            continue
        raise record.make_error(f"{field}.{key}", REFUSED_KEYS.get(key, _UNKNOWN))
    if not known_role:
        raise record.make_error(f"{field}.{role_key}", f"role {shorten(repr(role))} is not one of {', '.join(ROLES)}")
    calls: Sequence[FunctionCall] = ()
    call_ids = [str(message.get("tool_call_id", ""))]
    if not is_empty(message.get(calls_key, "")):
        calls, call_ids = read_tool_calls(record, message[calls_key], f"{field}.{calls_key}")
    if content_key not in message and not calls:
        raise record.make_error(f"{field}.{content_key}", "is missing; write the text of the message, or remove the row")
    flag = _read_flag(record, message, field, known_role, default=is_learned)
    return RawMessage(field, known_role, message.get(content_key, ""), flag, calls, call_ids)


def _read_flag(record: DataRecord, message: Mapping[str, object], field: str, role: str, *, default: bool) -> bool:
    flags = {key: message[key] for key in LOSS_FLAGS if key in message}
    for key, value in flags.items():
        if value not in (0, 1):
            raise record.make_error(f"{field}.{key}", f"must be 0, 1, true or false, not {shorten(repr(value))}")
        if value and role != "assistant":
            raise record.make_error(
                f"{field}.{key}", f"is set in a message with the role {role}, but only assistant messages are trained on; remove this key"
            )
    if len({bool(value) for value in flags.values()}) > 1:
        raise record.make_error(field, f"has {' and '.join(flags)}, which contradict each other; keep one of them")
    return all(flags.values()) if flags else default


_ALTERNATING = re.compile("s?((u|t+u?)a)*(u|t+u?)?")
"""Matches the initials of the roles of a conversation."""


def check_turns(record: DataRecord, messages: Sequence[RawMessage], *, column: str) -> None:
    """Raise ValueError unless user and assistant messages alternate after any system message.

    In place of a user message, there may be one or more tool messages, with or without a user
    message after them. The last message must come from the assistant, and at least one assistant
    message must be trained on.
    """
    roles = [message.role for message in messages]
    if not _ALTERNATING.fullmatch("".join(role[0] for role in roles)):
        shown = shorten(", ".join(roles))
        raise record.make_error(
            column, f"user and assistant messages must alternate after an optional system message; the roles are {shown}"
        )
    if roles[-1:] != ["assistant"]:
        raise record.make_error(column, "must end with an assistant message")
    if not any(message.role == "assistant" and message.is_learned for message in messages):
        raise record.make_error(column, "every response in this row is masked, so the row has no training target; remove the row")


def check_calls(record: DataRecord, messages: Sequence[RawMessage], *, tools: Sequence[str]) -> None:
    """Raise ValueError unless every call has one result, in the order of the calls.

    The results are the tool messages after a response. The last response of a conversation has
    none. `tools` contains the names of the tools of the row; without any, all names are accepted.
    """
    for index, message in enumerate(messages):
        unknown = next((call.name for call in message.calls if tools and call.name not in tools), None)
        if unknown is not None:
            raise record.make_error(f"{message.location}.tool_calls", f"calls {unknown}, which is not one of the tools {', '.join(tools)}")
        results = list(itertools.takewhile(lambda each: each.role == "tool", messages[index + 1 :]))
        if not message.calls or index == len(messages) - 1:
            continue
        if len(results) != len(message.calls):
            remedy = "write one message with the role tool for each call, in the order of the calls"
            raise record.make_error(f"{message.location}.tool_calls", f"{len(message.calls)} calls, but {len(results)} results; {remedy}")
        for result, call_id in zip(results, message.call_ids, strict=True):
            (given,) = result.call_ids
            if given and call_id and given != call_id:
                remedy = f"the call at this place has the id {shorten(call_id)}; write the results in the order of the calls"
                raise record.make_error(f"{result.location}.tool_call_id", f"is {shorten(given)}, but {remedy}")
