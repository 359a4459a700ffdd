"""The parts that the readers of replies are made of: total functions on untrusted text, in time linear in its length."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.rewards.answer import BOX, unboxed
from megatron_rl.tasks.visual_python.tool_protocol import Answer, Call, Code, Malformed


@dataclass(slots=True, frozen=True)
class Blocks:
    """What stands between the tags of a reply: all of one kind, or nothing (`tag` is empty)."""

    tag: str = ""
    bodies: tuple[str, ...] = ()


def read_blocks(reply: str, *, action: str, reserved: tuple[str, ...]) -> Blocks | Malformed:
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
            return Malformed(f"only the environment writes {match[0]}")
        elif opened or closing:
            return Malformed(f"{match[0]} stands where it has no place")
        else:
            opened, start = tag, match.end()
    if opened:
        return Malformed(f"<{opened}> is not closed by </{opened}>")
    if len(tags) > 1:
        return Malformed(f"a reply holds either <{action}> or <answer>, not both")
    if tags == {"answer"} and len(bodies) > 1:
        return Malformed(f"there are {len(bodies)} answers; give one")
    return Blocks(next(iter(tags), ""), tuple(bodies))


def nothing_found(action: str) -> Malformed:
    return Malformed(f"there is neither <{action}>...</{action}> nor <answer>...</answer>")


def read_answer(body: str) -> Answer | Malformed:
    text = body.strip()
    return Answer(text) if text else Malformed("the answer is empty")


def read_boxed(body: str) -> Answer | Malformed:
    r"""The inside of `\boxed{...}` with balanced braces and nothing beside it; an escaped brace (`\{`) counts for none."""
    text = body.strip()
    inside = unboxed(text)
    if inside == text or BOX in inside:
        return Malformed("an answer is \\boxed{...} on a line of its own between <answer> and </answer>")
    return read_answer(inside)


def read_python(bodies: tuple[str, ...]) -> Code | Malformed:
    """Blocks of code joined, each without the fence around it."""
    source = "\n".join(_unfenced(body) for body in bodies)
    return Code(source) if source.strip() else Malformed("there is no code in the block")


def last_fenced(reply: str) -> str | None:
    """The inside of the last python fence that stands on lines of its own and is closed."""
    last, start = None, -1
    lines = reply.split("\n")
    for number, line in enumerate(lines):
        if start < 0 and line.strip() in ("```python", "```py"):
            start = number + 1
        elif start >= 0 and line.strip() == "```":
            last, start = "\n".join(lines[start:number]), -1
    return last


def read_call(body: str) -> Call | Malformed:
    """One JSON object {"name": text, "arguments": object}, the arguments no deeper than a list."""
    try:
        read = json.loads(body)
    except (ValueError, RecursionError):  # malformed, or an integer beyond Python's digit limit; nested too deep
        return Malformed("the tool call is no JSON")
    if not isinstance(read, dict) or not isinstance(read.get("name"), str) or not isinstance(read.get("arguments"), dict):
        return Malformed('a tool call is one JSON object {"name": <name>, "arguments": <object>}')
    arguments: Mapping[str, object] = read["arguments"]
    if not all(_is_flat(value) for value in (*arguments, *arguments.values())):
        return Malformed("arguments are numbers, texts in Unicode, or lists of these")
    return Call(read["name"], arguments)


def read_tool_call(reply: str, *, several: bool) -> Answer | Call | Malformed:
    """A reply that calls tools as Qwen's chat template has it: the answer, or a call; the last one, where there may be several."""
    found = read_blocks(reply, action="tool_call", reserved=("tool_response",))
    if isinstance(found, Malformed):
        return found
    if found.tag == "answer":
        return read_answer(found.bodies[0])
    if not found.tag:
        return nothing_found("tool_call")
    if len(found.bodies) > 1 and not several:
        return Malformed("call one function at a time")
    return read_call(found.bodies[-1])


def _unfenced(body: str) -> str:
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
