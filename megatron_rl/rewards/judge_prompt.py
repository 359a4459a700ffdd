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
from megatron_rl.rewards.text_quoting import LEGEND, quoted

LONGEST_VERDICT = 200
"""A verdict is one key and one value; a longer reply is none, and is not parsed."""


PLACE = "<image>"
"""Placeholder of a picture in a question (data/records.py). Judges without vision get none, others have the pictures behind the text."""
_PLACE = re.compile(rf"\s*{PLACE}\s*")


class Malformed(InvalidReply):
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

    def text(self, fields: Mapping[str, str]) -> str:
        """The user's message. Raises KeyError for a field that the prompt has and `fields` lacks."""
        return Template(self.user).substitute({name: quoted(without_places(value)) for name, value in fields.items()})

    def read(self, reply: str) -> float:
        """The verdict as a number. Raises Malformed unless the whole reply is one JSON object with this key and one of these values."""
        try:
            pairs = json.loads(reply, object_pairs_hook=tuple) if len(reply) <= LONGEST_VERDICT else ()
        except (ValueError, RecursionError):
            pairs = ()
        for value in self.values:
            if pairs == ((self.key, value),) and isinstance(pairs[0][1], bool) == isinstance(value, bool):
                return float(value)
        raise Malformed(f"no verdict of the form {json.dumps({self.key: self.values[0]})}: {reply[:LONGEST_VERDICT]!r}")


def without_places(text: str) -> str:
    """Return the text without the places of pictures; what stood on both sides of one stays apart.

    Example: `<image>\nCompare <image> and <image 2>.` -> `Compare and <image 2>.` (numbered names are the data set's own words).
    """
    if PLACE not in text:
        return text
    return _PLACE.sub(lambda found: "\n" if "\n" in found[0] else " ", text).strip()


@functools.cache
def load(name: str, *, examples: str = "") -> JudgePrompt:
    """prompts/<name>.yaml, with that family of its examples."""
    written = yaml.safe_load((Path(__file__).with_name("prompts") / f"{name}.yaml").read_text())
    key, user = written["key"], written["user"]
    if examples:
        shown = [_example(example, key) for example in written["examples"][examples]]
        user = user.replace("$examples", "\n\n".join(shown).replace("$", "$$"))
    return JudgePrompt(name, written["version"], key, tuple(written["values"]), f"{written['system']} {LEGEND}", user)


def _example(example: Mapping[str, object], key: str) -> str:
    shown = [f"{name}: {quoted(value)}" for name, value in example.items() if name != key]
    return "\n".join([*shown, json.dumps({key: example[key]})])
