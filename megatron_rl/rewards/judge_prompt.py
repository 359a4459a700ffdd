"""A judge's instructions, one file a prompt in rewards/prompts/, with a version; and the only form that a verdict may have.

version: 2
key: correct                 the verdict is {"correct": true} or {"correct": false}, the whole reply and nothing else
values: [true, false]
system: ...
user: ... $question ...      fields are filled in as quotations (text_quoting.py), of which the system is told
examples:                    families of worked examples, of which $examples becomes one
  chart: [{question: ..., reference: ..., answer: ..., correct: true}, ...]
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

import yaml

from megatron_rl.clients.endpoint_pool import InvalidReply
from megatron_rl.rewards.text_quoting import QUOTING_LEGEND, quote_text

MAX_VERDICT_CHARS = 200
"""A verdict is one key and one value; a longer reply is none, and is not parsed."""


IMAGE_PLACEHOLDER = "<image>"
"""Placeholder of a picture in a question (data/records.py). Judges without vision get none, others have the pictures behind the text."""
_IMAGE_PLACEHOLDER = re.compile(rf"\s*{IMAGE_PLACEHOLDER}\s*")


class MalformedVerdict(InvalidReply):
    """A reply that is no verdict."""


@dataclass(slots=True, frozen=True)
class JudgePrompt:
    name: str
    version: int
    key: str
    values: tuple[bool | float, ...]
    system: str
    user: str

    @property
    def schema(self) -> dict[str, object]:
        """Of the verdict, for servers that hold their model to one."""
        boolean = isinstance(self.values[0], bool)
        value = {"type": "boolean"} if boolean else {"type": "number", "enum": list(self.values)}
        return {"type": "object", "properties": {self.key: value}, "required": [self.key], "additionalProperties": False}

    def render(self, fields: Mapping[str, str]) -> str:
        """The user's message. Raises KeyError for a field that the prompt has and `fields` lacks."""
        return Template(self.user).substitute({name: quote_text(remove_image_placeholders(value)) for name, value in fields.items()})

    def parse_verdict(self, reply: str) -> float:
        """The verdict as a number. Raises Malformed unless the whole reply is one JSON object with this key and one of these values."""
        try:
            pairs = json.loads(reply, object_pairs_hook=tuple) if len(reply) <= MAX_VERDICT_CHARS else ()
        except (ValueError, RecursionError):
            pairs = ()
        for value in self.values:
            if pairs == ((self.key, value),) and isinstance(pairs[0][1], bool) == isinstance(value, bool):
                return float(value)
        raise MalformedVerdict(f"no verdict of the form {json.dumps({self.key: self.values[0]})}: {reply[:MAX_VERDICT_CHARS]!r}")


def remove_image_placeholders(text: str) -> str:
    """Return the text without the places of pictures; what stood on both sides of one stays apart.

    Example: `<image>\nCompare <image> and <image 2>.` -> `Compare and <image 2>.` (numbered names are the data set's own words).
    """
    if IMAGE_PLACEHOLDER not in text:
        return text
    return _IMAGE_PLACEHOLDER.sub(lambda found: "\n" if "\n" in found[0] else " ", text).strip()


@functools.cache
def load_judge_prompt(name: str, *, examples: str = "") -> JudgePrompt:
    """prompts/<name>.yaml, with that family of its examples."""
    written = yaml.safe_load((Path(__file__).with_name("prompts") / f"{name}.yaml").read_text())
    key, user = written["key"], written["user"]
    if examples:
        shown = [_format_example(example, key) for example in written["examples"][examples]]
        user = user.replace("$examples", "\n\n".join(shown).replace("$", "$$"))
    return JudgePrompt(name, written["version"], key, tuple(written["values"]), f"{written['system']} {QUOTING_LEGEND}", user)


def _format_example(example: Mapping[str, object], key: str) -> str:
    shown = [f"{name}: {quote_text(value)}" for name, value in example.items() if name != key]
    return "\n".join([*shown, json.dumps({key: example[key]})])
