"""Building blocks for the reply parsers of tool protocols.

Replies are untrusted. The functions therefore accept any text and run in time linear in the length
of the text.
"""

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megatron_rl.rewards.answer import BOX_COMMAND, strip_box
from megatron_rl.tasks.visual_python.tool_protocol import CodeAction, FinalAnswer, MalformedReply, ToolAction

MAX_DEPTH = 32
"""Maximum number of levels of nested lists and objects in arguments."""


@dataclass(slots=True, frozen=True)
class ReplyBlocks:
    """Contents of the tagged blocks of a reply.

    All blocks have the same tag. If the reply has no blocks, `tag` is empty.
    """

    tag: str = ""
    bodies: tuple[str, ...] = ()


def parse_blocks(reply: str, *, action: str, reserved: tuple[str, ...]) -> ReplyBlocks | MalformedReply:
    """Return the `<action>...</action>` blocks of a reply, or its `<answer>...</answer>` block.

    Tags inside an action are ignored up to the closing tag of the action, because code may contain
    any text. An answer must not contain tags of the protocol.

    Args:
        reply: Text that the policy generated.
        action: Name of the tag around an action, e.g. `code`.
        reserved: Names of tags that only the environment may write. A reply with such a tag outside
            of an action imitates an observation and is malformed.
    """
    bodies: list[str] = []
    tags: set[str] = set()
    opened, start = "", 0
    for match in re.finditer(f"<(/?)({'|'.join((action, 'answer', *reserved))})>", reply):
        closing, tag = bool(match[1]), match[2]
        if opened and closing and tag == opened:
            bodies.append(reply[start : match.start()])
            tags.add(tag)
            opened = ""
        elif opened == action:
            continue
        elif tag in reserved:
            return MalformedReply(f"only the environment writes {match[0]}")
        elif opened or closing:
            return MalformedReply(f"{match[0]} stands where it has no place")
        else:
            opened, start = tag, match.end()
    if opened:
        return MalformedReply(f"<{opened}> is not closed by </{opened}>")
    if len(tags) > 1:
        return MalformedReply(f"a reply holds either <{action}> or <answer>, not both")
    if tags == {"answer"} and len(bodies) > 1:
        return MalformedReply(f"there are {len(bodies)} answers; give one")
    return ReplyBlocks(next(iter(tags), ""), tuple(bodies))


def make_no_action_error(action: str) -> MalformedReply:
    """Return the error for a reply with neither an action nor an answer."""
    return MalformedReply(f"there is neither <{action}>...</{action}> nor <answer>...</answer>")


def parse_answer(body: str) -> FinalAnswer | MalformedReply:
    """Return the answer without surrounding whitespace. An empty answer is malformed."""
    text = body.strip()
    return FinalAnswer(text) if text else MalformedReply("the answer is empty")


def parse_boxed_answer(body: str) -> FinalAnswer | MalformedReply:
    r"""Return the answer inside `\boxed{...}`. An answer with text outside of the box is malformed.

    The braces must be balanced. Escaped braces (`\{`) are not counted.
    """
    text = body.strip()
    inside = strip_box(text)
    if inside == text or BOX_COMMAND in inside:
        return MalformedReply("an answer is \\boxed{...} on a line of its own between <answer> and </answer>")
    return parse_answer(inside)


def join_code_blocks(bodies: tuple[str, ...]) -> CodeAction | MalformedReply:
    """Remove the fence around each code block and join the blocks into one CodeAction."""
    source = "\n".join(_strip_fence(body) for body in bodies)
    return CodeAction(source) if source.strip() else MalformedReply("there is no code in the block")


def find_last_fence(reply: str) -> str | None:
    """Return the contents of the last closed ```python fence, or None if there is no such fence.

    The opening and the closing fence must each be on a line of its own.
    """
    last, start = None, -1
    lines = reply.split("\n")
    for number, line in enumerate(lines):
        if start < 0 and line.strip() in ("```python", "```py"):
            start = number + 1
        elif start >= 0 and line.strip() == "```":
            last, start = "\n".join(lines[start:number]), -1
    return last


def parse_tool_call(body: str, *, nested: Collection[str] = ()) -> ToolAction | MalformedReply:
    """Parse one JSON object `{"name": string, "arguments": object}`.

    Each argument must be null, a number, a valid Unicode string, or a list of such values.
    Arguments of the tools in `nested` may be any JSON value without NaN and infinities.
    """
    try:
        read = json.loads(body)
    except (ValueError, RecursionError):  # invalid JSON, an integer beyond Python's digit limit, or too deep nesting
        return MalformedReply("the tool call is no JSON")
    if not isinstance(read, dict) or not isinstance(read.get("name"), str) or not isinstance(read.get("arguments"), dict):
        return MalformedReply('a tool call is one JSON object {"name": <name>, "arguments": <object>}')
    arguments: Mapping[str, object] = read["arguments"]
    if read["name"] in nested:
        if not _is_json(arguments):
            return MalformedReply(f"arguments are JSON with texts in Unicode, finite numbers and at most {MAX_DEPTH} levels")
        return ToolAction(read["name"], arguments)
    if not all(_is_flat(value) for value in (*arguments, *arguments.values())):
        return MalformedReply("arguments are numbers, texts in Unicode, or lists of these")
    return ToolAction(read["name"], arguments)


def parse_tool_reply(reply: str, *, allow_several: bool, nested: Collection[str] = ()) -> FinalAnswer | ToolAction | MalformedReply:
    """Parse a reply in the tool-call format of Qwen's chat template.

    If the reply contains several calls and `allow_several` is True, the last call is returned. If
    `allow_several` is False, such a reply is malformed. `nested` is that of `parse_tool_call`.
    """
    found = parse_blocks(reply, action="tool_call", reserved=("tool_response",))
    if isinstance(found, MalformedReply):
        return found
    if found.tag == "answer":
        return parse_answer(found.bodies[0])
    if not found.tag:
        return make_no_action_error("tool_call")
    *earlier, last = found.bodies
    if earlier and not allow_several:
        return MalformedReply("call one function at a time")
    return parse_tool_call(last, nested=nested)


def _strip_fence(body: str) -> str:
    lines = body.strip().split("\n")
    if not lines[0].startswith("```"):
        return body
    return "\n".join(lines[1:-1] if len(lines) > 1 and lines[-1].strip() == "```" else lines[1:])


def _is_flat(value: object) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(item is None or isinstance(item, int | float) or (isinstance(item, str) and _is_unicode(item)) for item in values)


def _is_json(value: object, *, depth: int = 0) -> bool:
    match value:
        case str():
            return _is_unicode(value)
        case float():
            return math.isfinite(value)
        case Mapping() | list() if depth >= MAX_DEPTH:
            return False
        case Mapping():
            return all(_is_unicode(name) and _is_json(item, depth=depth + 1) for name, item in value.items())
        case list():
            return all(_is_json(item, depth=depth + 1) for item in value)
    return True


def _is_unicode(text: str) -> bool:
    """Return False if the text contains lone surrogates.

    JSON can encode lone surrogates, but tokenizers and text files cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
