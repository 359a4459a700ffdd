"""Building blocks of reply parsers.

They accept any untrusted text and take time linear in its length.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.rewards.answer import BOX_COMMAND, strip_box
from megatron_rl.tasks.visual_python.tool_protocol import CodeAction, FinalAnswer, MalformedReply, ToolAction


@dataclass(slots=True, frozen=True)
class ReplyBlocks:
    """Contents of a reply's tags: all with the same tag, or none (`tag` is empty)."""

    tag: str = ""
    bodies: tuple[str, ...] = ()


def parse_blocks(reply: str, *, action: str, reserved: tuple[str, ...]) -> ReplyBlocks | MalformedReply:
    """Return the `<action>...</action>` blocks of a reply, or its one `<answer>...</answer>`.

    The body of an action is opaque up to its closing tag, because code may contain any text. An
    answer must not contain tags.

    Args:
        reply: Text that the policy generated.
        action: Tag of actions.
        reserved: Tags that only the environment writes. A reply with one of them outside of an
            action has made up its own observation and is malformed.
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
    """Return the error for a reply with neither action nor answer."""
    return MalformedReply(f"there is neither <{action}>...</{action}> nor <answer>...</answer>")


def parse_answer(body: str) -> FinalAnswer | MalformedReply:
    """Return the answer, stripped; an empty one is malformed."""
    text = body.strip()
    return FinalAnswer(text) if text else MalformedReply("the answer is empty")


def parse_boxed_answer(body: str) -> FinalAnswer | MalformedReply:
    r"""Return the contents of `\boxed{...}`, which must be all that the body contains.

    Braces must be balanced; an escaped brace (`\{`) does not count.
    """
    text = body.strip()
    inside = strip_box(text)
    if inside == text or BOX_COMMAND in inside:
        return MalformedReply("an answer is \\boxed{...} on a line of its own between <answer> and </answer>")
    return parse_answer(inside)


def join_code_blocks(bodies: tuple[str, ...]) -> CodeAction | MalformedReply:
    """Join code blocks into one source, each without the fence around it."""
    source = "\n".join(_strip_fence(body) for body in bodies)
    return CodeAction(source) if source.strip() else MalformedReply("there is no code in the block")


def find_last_fence(reply: str) -> str | None:
    """Return the contents of the last closed python fence, or None.

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


def parse_tool_call(body: str) -> ToolAction | MalformedReply:
    """Parse one JSON object `{"name": string, "arguments": object}`.

    Arguments are null, numbers, valid Unicode strings, or lists of these.
    """
    try:
        read = json.loads(body)
    except (ValueError, RecursionError):  # malformed, or an integer beyond Python's digit limit; nested too deep
        return MalformedReply("the tool call is no JSON")
    if not isinstance(read, dict) or not isinstance(read.get("name"), str) or not isinstance(read.get("arguments"), dict):
        return MalformedReply('a tool call is one JSON object {"name": <name>, "arguments": <object>}')
    arguments: Mapping[str, object] = read["arguments"]
    if not all(_is_flat(value) for value in (*arguments, *arguments.values())):
        return MalformedReply("arguments are numbers, texts in Unicode, or lists of these")
    return ToolAction(read["name"], arguments)


def parse_tool_reply(reply: str, *, allow_several: bool) -> FinalAnswer | ToolAction | MalformedReply:
    """Parse a reply in the tool-call format of Qwen's chat template.

    Returns the answer, or the call. If there are several calls, the last one is returned if
    `allow_several`; otherwise the reply is malformed.
    """
    found = parse_blocks(reply, action="tool_call", reserved=("tool_response",))
    if isinstance(found, MalformedReply):
        return found
    if found.tag == "answer":
        return parse_answer(found.bodies[0])
    if not found.tag:
        return make_no_action_error("tool_call")
    if len(found.bodies) > 1 and not allow_several:
        return MalformedReply("call one function at a time")
    return parse_tool_call(found.bodies[-1])


def _strip_fence(body: str) -> str:
    lines = body.strip().split("\n")
    if not lines[0].startswith("```"):
        return body
    return "\n".join(lines[1:-1] if len(lines) > 1 and lines[-1].strip() == "```" else lines[1:])


def _is_flat(value: object) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(item is None or isinstance(item, int | float) or (isinstance(item, str) and _is_unicode(item)) for item in values)


def _is_unicode(text: str) -> bool:
    """Return False for text with lone surrogates.

    JSON can encode them, but tokenizers and files cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
