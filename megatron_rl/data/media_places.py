"""Placeholders for media or objects that other trainers' files use and that nothing fills here."""

import re

from megatron_rl.data.records import IMAGE_PLACEHOLDER

PARTS_AS_TEXT = re.compile(r"\s*\[\s*\{\s*[\"']type[\"']\s*:\s*[\"'](text|image|image_url|input_text|input_image|video|audio)[\"']")
"""Pattern of the start of a list of content parts that was written as text."""
_MEDIA = re.compile(
    r"<\|?(?:images?|img|videos?|audios?)(?:[ _-]?(?:\d+|pad|start|end|begin|placeholder|soft_token|tokens?|context|here))?\|?>"
    r"|<\|media_\w+\|>|<im_(?:start|end|patch)>|<\|?(?:start|begin|end)_of_(?:image|video|audio)\|?>|<fake_token_around_image>"
    r"|\[(?:IMG|IMAGE)\]|(?<=<image>)(?:\./)?</image>",
    re.IGNORECASE,
)
"""Media placeholders of LLaVA, InternVL, InternLM, Phi, Gemma, Mistral, Qwen, GLM, Kimi, Idefics,
MiniCPM, DeepSeek and ms-swift.
"""
_OBJECTS = re.compile(r"<(bbox|ref-object|point|cot-process)>")
"""Object placeholders of ms-swift, which fills them from its column `objects`.

With a closing tag </..> they are part of a response's text.
"""


def find_media_placeholder(text: str) -> str:
    """Return the first media placeholder other than IMAGE_PLACEHOLDER, or "" if there is none."""
    return next((found[0] for found in _MEDIA.finditer(text) if found[0] != IMAGE_PLACEHOLDER), "")


def find_object_placeholder(text: str) -> str:
    """Return the first object placeholder, or "" if there is none."""
    return next((found[0] for found in _OBJECTS.finditer(text) if f"</{found[1]}>" not in text), "")
