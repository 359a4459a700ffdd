"""Parses chat messages into a question, a system message and images.

All messages before the first assistant message are read; if one of these messages is invalid, the
row is rejected. User messages are joined with line breaks, in order. Messages with the role system
or developer are joined into the system message. The assistant message after the question is not
read, because it contains an answer.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_rl.data.images import StoredImage, shorten
from megatron_rl.data.media_places import PARTS_AS_TEXT
from megatron_rl.data.records import IMAGE_PLACEHOLDER, DataRecord
from megatron_rl.data.rows import drop_nulls

ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
"""Maps each role in a file to system, user, assistant or tool.

Values of the key `from`, as in LLaMA-Factory, are included.
"""
TEXT_PARTS, IMAGE_PARTS = ("text", "input_text"), ("image", "image_url", "input_image")
IMAGE_KEYS = ("image", "image_url", "path", "url", "base64", "bytes")
"""Keys under which a content part may contain its image."""
HARMLESS_KEYS = {"id", "uuid", "timestamp", "created_at", "detail", "cache_control"}
"""Keys of messages and content parts that do not change the question."""
_KEYS = {"role", "content", "from", "value"}
_LIST_OF_MESSAGES = re.compile(r"""\s*\[\s*\{[^{}\[\]]{0,200}?["'](role|content|from|value)["']\s*:""")
LOSS_KEYS = {"loss", "weight", "train", "trainable", "loss_mask"}
"""Keys that exclude a message from the loss.

The values false and 0 are accepted without effect, because prompt tokens are never trained on.
"""


@dataclass(slots=True)
class ChatPrompt:
    """Question, system message and images read from chat messages."""

    question: str = ""
    system: str = ""
    images: list[StoredImage | None] = field(default_factory=list)
    """One entry per image placeholder in the question, in order.

    None represents the next image in the row's image column.
    """


def parse_messages(record: DataRecord, value: object, name: str) -> object:
    """Parse chat messages that are given as JSON text; return any other value unchanged.

    Accepted JSON values are a list of messages, a single message, {"messages": [...]}, and a string
    that contains one of these.

    Raises:
        ValueError: the text starts like a list of messages but is not valid JSON.
    """
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{", '"'):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:
        if not _LIST_OF_MESSAGES.match(value):
            return value
        raise record.make_error(name, f"looks like messages but is not valid JSON ({error}); write it with json.dumps") from error
    if isinstance(found, str):
        inner = parse_messages(record, found, name)
        return value if isinstance(inner, str) else inner
    if isinstance(found, Mapping):
        is_message = {"role", "content"} <= found.keys() or {"from", "value"} <= found.keys()
        found = [found] if is_message else found["messages"] if found.keys() == {"messages"} else []
    are_mappings = isinstance(found, list) and all(isinstance(each, Mapping) for each in found)
    return drop_nulls(found) if are_mappings and any(_KEYS & each.keys() for each in found) else value


def read_chat(record: DataRecord, value: object, name: str) -> ChatPrompt:
    """Read the question, system message and images from chat messages.

    Raises:
        ValueError: a message cannot be used; the error names the message.
    """
    messages = [record.require_mapping(message, f"{name}[{number}]") for number, message in enumerate(record.require_list(value, name))]
    roles = [_role(record, message, f"{name}[{number}]") for number, message in enumerate(messages)]
    if "user" not in roles:
        raise record.make_error(name, "has no user message")
    end = roles.index("assistant") if "assistant" in roles else len(roles)
    if "user" in roles[end:]:
        raise record.make_error(
            name, "has user messages after an assistant message; the question must come before the first assistant message"
        )
    if "tool" in roles[:end]:
        remedy = "move its text into the user message, or remove it"
        raise record.make_error(f"{name}[{roles.index('tool')}]", f"is a tool message, which is not supported before the answer; {remedy}")
    if "system" in roles[end:]:
        raise record.make_error(name, "has a system message after an assistant message; move the system message to the front, or remove it")
    for number in range(end, len(messages)):
        if _shows_picture(messages[number].get("content", messages[number].get("value"))):
            remedy = "only images of the question are read: remove this message and its image"
            raise record.make_error(f"{name}[{number}]", f"contains an image after the question; {remedy}")
    prompt = ChatPrompt()
    texts: dict[str, list[str]] = {"system": [], "user": []}
    for number, (message, role) in enumerate(zip(messages[:end], roles, strict=False)):
        texts[role].append(_read_message(record, message, f"{name}[{number}]", prompt.images, is_user=role == "user"))
    prompt.question, prompt.system = "\n".join(texts["user"]), "\n\n".join(texts["system"])
    return prompt


def _role(record: DataRecord, message: Mapping[str, object], name: str) -> str:
    role = message.get("role", message.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        raise record.make_error(f"{name}.role", f"{shorten(repr(role))} is not one of {', '.join(ROLES)}")
    return ROLES[role]


def _read_message(record: DataRecord, message: Mapping[str, object], name: str, images: list[StoredImage | None], *, is_user: bool) -> str:
    """Return a message's text with image placeholders, and append its images to `images`."""
    known = {"role", "content"} if "role" in message else {"from", "value"}
    unknown = {key: value for key, value in message.items() if key not in LOSS_KEYS or value}
    _require_known(record, unknown, known, name)
    content = message.get("content" if "role" in message else "value")
    if isinstance(content, str) and PARTS_AS_TEXT.match(content):
        raise record.make_error(name, "the content is text that contains a list of parts; store the list itself")
    before = len(images)
    text = _read_text(record, content, name, images) if isinstance(content, str) else _read_parts(record, content, name, images)
    if len(images) > before and not is_user:
        raise record.make_error(name, "contains an image in a system message; move it to the user message")
    return text


def _shows_picture(content: object) -> bool:
    if isinstance(content, list):
        return any(isinstance(part, Mapping) and part.get("type", "") in IMAGE_PARTS for part in content)
    return isinstance(content, str) and IMAGE_PLACEHOLDER in content


def _read_text(record: DataRecord, text: object, name: str, images: list[StoredImage | None]) -> str:
    read = record.require_text(text, name)
    images += [None] * read.count(IMAGE_PLACEHOLDER)
    return read


def _read_parts(record: DataRecord, content: object, name: str, images: list[StoredImage | None]) -> str:
    if not isinstance(content, list):
        raise record.make_error(name, f"content must be text or a list of parts, not {type(content).__name__}")
    words = []
    for number, given in enumerate(content):
        part, place = record.require_mapping(given, f"{name}.content[{number}]"), f"{name}.content[{number}]"
        kind = part.get("type") or next((key for key in ("text", "image", "image_url") if key in part), None)
        if kind in TEXT_PARTS:
            _require_known(record, part, {"type", "text"}, place)
            words.append(_read_text(record, part.get("text"), place, images))
        elif kind in IMAGE_PARTS:
            _require_known(record, part, {"type", "text", "index", *IMAGE_KEYS}, place)
            if part.get("index", len(images)) != len(images):
                raise record.make_error(
                    f"{place}.index", f"is {part['index']}, but the image has index {len(images)}; list images in order"
                )
            images.append(_read_picture(record, part, place))
            words.append(IMAGE_PLACEHOLDER)
        else:
            remedy = f"supported types are {', '.join((*TEXT_PARTS, *IMAGE_PARTS))}"
            raise record.make_error(place, f"has the type {shorten(repr(kind))}, which is not supported; {remedy}")
    return "".join(words)


def _read_picture(record: DataRecord, part: Mapping[str, object], name: str) -> StoredImage | None:
    """Return the image of a content part, or None if the part is a placeholder."""
    given = {key: part[key] for key in IMAGE_KEYS if part.get(key, "") not in ("", {})}
    if part.get("text"):
        raise record.make_error(f"{name}.text", "is in an image part; move it to a text part")
    if len(given) > 1:
        raise record.make_error(name, f"names its image more than once: {', '.join(given)}; keep one of them")
    for key, value in given.items():
        if key == "image_url" and isinstance(value, Mapping):
            _require_known(record, value, {"url"}, f"{name}.image_url")
            value = value.get("url")
        elif isinstance(value, Mapping):
            _require_known(record, value, {"bytes", "path"}, f"{name}.{key}")
        return record.load_image({"bytes": value} if key in ("base64", "bytes") else value, f"{name}.{key}")
    return None


def _require_known(record: DataRecord, given: Mapping[str, object], known: set[str], name: str) -> None:
    """Raise ValueError if a key outside `known` has a value that may change the question."""
    for key, value in given.items():
        if key not in known and key not in HARMLESS_KEYS and value not in ("", [], {}):
            raise record.make_error(
                f"{name}.{key}", f"is not read ({shorten(repr(value))}); remove this key, or write its value into the content"
            )
