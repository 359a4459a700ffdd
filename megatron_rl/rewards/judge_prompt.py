"""Loads judge prompts, which are versioned files in rewards/prompts/, and parses verdicts.

A prompt file contains these keys:

    version: 2
    key: correct             the reply must be exactly {"correct": true} or {"correct": false}
    values: [true, false]
    system: ...
    user: ... $question ...  fields are quoted (text_quoting.py), which the system prompt explains
    examples:                families of worked examples; $examples is replaced by one of them
      chart: [{question: ..., reference: ..., answer: ..., correct: true}, ...]
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import yaml

from megatron_rl.clients.endpoint_pool import InvalidReply
from megatron_rl.rewards.text_quoting import QUOTING_LEGEND, quote_text

MAX_VERDICT_CHARS = 200
"""Maximum length of a judge's reply in characters; a longer reply is rejected, because a verdict
has only one key and one value.
"""


IMAGE_PLACEHOLDER = "<image>"
"""Placeholder for an image in a question (data/records.py). It is removed from the judge's text:
judges with vision receive the images after the text, and other judges receive no images.
"""
_IMAGE_PLACEHOLDER = re.compile(rf"\s*{IMAGE_PLACEHOLDER}\s*")


class MalformedVerdict(InvalidReply):
    """Raised if a judge's reply is not a valid verdict."""


@dataclass(slots=True, frozen=True)
class JudgePrompt:
    """Prompt of a judge, with the JSON key and the possible values of the verdict."""

    name: str
    version: int
    key: str
    values: tuple[bool | float, ...]
    system: str
    user: str

    @property
    def schema(self) -> dict[str, object]:
        """JSON schema of the verdict, for servers with structured output."""
        boolean = isinstance(self.values[0], bool)
        value = {"type": "boolean"} if boolean else {"type": "number", "enum": list(self.values)}
        return {"type": "object", "properties": {self.key: value}, "required": [self.key], "additionalProperties": False}

    def render(self, fields: Mapping[str, str]) -> str:
        """Return the user message. Raises KeyError if a field of the prompt is not in `fields`."""
        return Template(self.user).substitute({name: quote_text(remove_image_placeholders(value)) for name, value in fields.items()})

    def parse_verdict(self, reply: str) -> float:
        """Return the verdict as a number.

        Raises:
            MalformedVerdict: The reply is not exactly one JSON object with the prompt's key and one
                of its values.
        """
        pairs: tuple[Any, ...]
        try:
            pairs = json.loads(reply, object_pairs_hook=tuple) if len(reply) <= MAX_VERDICT_CHARS else ()
        except (ValueError, RecursionError):
            pairs = ()
        for value in self.values:
            if pairs == ((self.key, value),) and isinstance(pairs[0][1], bool) == isinstance(value, bool):
                return float(value)
        raise MalformedVerdict(f"no verdict of the form {json.dumps({self.key: self.values[0]})}: {reply[:MAX_VERDICT_CHARS]!r}")


def remove_image_placeholders(text: str) -> str:
    r"""Replace image placeholders with a line break if they adjoin a line break, else with a space.

    Numbered placeholders such as `<image 2>` are part of the text and are kept. Example:
    `<image>\nCompare <image> and <image 2>.` becomes `Compare and <image 2>.`
    """
    if IMAGE_PLACEHOLDER not in text:
        return text
    return _IMAGE_PLACEHOLDER.sub(lambda found: "\n" if "\n" in found[0] else " ", text).strip()


@functools.cache
def load_judge_prompt(name: str, *, examples: str = "") -> JudgePrompt:
    """Load prompts/<name>.yaml; `examples` is the name of a family of worked examples."""
    written = yaml.safe_load((Path(__file__).with_name("prompts") / f"{name}.yaml").read_text())
    key, user = written["key"], written["user"]
    if examples:
        shown = [_format_example(example, key) for example in written["examples"][examples]]
        user = user.replace("$examples", "\n\n".join(shown).replace("$", "$$"))
    return JudgePrompt(name, written["version"], key, tuple(written["values"]), f"{written['system']} {QUOTING_LEGEND}", user)


def _format_example(example: Mapping[str, Any], key: str) -> str:
    shown = [f"{name}: {quote_text(value)}" for name, value in example.items() if name != key]
    return "\n".join([*shown, json.dumps({key: example[key]})])
