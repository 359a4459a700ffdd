"""The parts that the readers of replies are made of: total functions on untrusted text, in time linear in its length."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.rewards.answer import BOX_COMMAND, strip_box
from megatron_rl.tasks.visual_python.tool_protocol import CodeAction, FinalAnswer, MalformedReply, ToolAction


@dataclass(slots=True, frozen=True)
class ReplyBlocks:
    """What stands between the tags of a reply: all of one kind, or nothing (`tag` is empty)."""

    tag: str = ""
    bodies: tuple[str, ...] = ()


def parse_blocks(reply: str, *, action: str, reserved: tuple[str, ...]) -> ReplyBlocks | MalformedReply:
    """The blocks `<action>...</action>` of a reply, or its one `<answer>...</answer>`.

    An action's body is opaque up to its closing tag (code may hold any text); an answer holds no tag. `reserved` are the tags that only
    the environment writes: a reply that has them outside of an action has made its own observation up.
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
    return MalformedReply(f"there is neither <{action}>...</{action}> nor <answer>...</answer>")


def parse_answer(body: str) -> FinalAnswer | MalformedReply:
    text = body.strip()
    return FinalAnswer(text) if text else MalformedReply("the answer is empty")


def parse_boxed_answer(body: str) -> FinalAnswer | MalformedReply:
    r"""The inside of `\boxed{...}` with balanced braces and nothing beside it; an escaped brace (`\{`) counts for none."""
    text = body.strip()
    inside = strip_box(text)
    if inside == text or BOX_COMMAND in inside:
        return MalformedReply("an answer is \\boxed{...} on a line of its own between <answer> and </answer>")
    return parse_answer(inside)


def join_code_blocks(bodies: tuple[str, ...]) -> CodeAction | MalformedReply:
    """Blocks of code joined, each without the fence around it."""
    source = "\n".join(_strip_fence(body) for body in bodies)
    return CodeAction(source) if source.strip() else MalformedReply("there is no code in the block")


def find_last_fence(reply: str) -> str | None:
    """The inside of the last python fence that stands on lines of its own and is closed."""
    last, start = None, -1
    lines = reply.split("\n")
    for number, line in enumerate(lines):
        if start < 0 and line.strip() in ("```python", "```py"):
            start = number + 1
        elif start >= 0 and line.strip() == "```":
            last, start = "\n".join(lines[start:number]), -1
    return last


def parse_tool_call(body: str) -> ToolAction | MalformedReply:
    """One JSON object {"name": text, "arguments": object}, the arguments no deeper than a list."""
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
    """A reply that calls tools as Qwen's chat template has it: the answer, or a call; the last one, where there may be several."""
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
    """JSON can spell half of a surrogate pair, which no file and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
