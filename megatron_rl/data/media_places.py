"""Finds placeholders for media and objects that this trainer does not support."""

import re

from megatron_rl.data.records import IMAGE_PLACEHOLDER

PARTS_AS_TEXT = re.compile(r"\s*\[\s*\{\s*[\"']type[\"']\s*:\s*[\"'](text|image|image_url|input_text|input_image|video|audio)[\"']")
"""Matches the start of a list of content parts that was stored as text."""
_MEDIA = re.compile(
    r"<\|?(?:images?|img|videos?|audios?)(?:[ _-]?(?:\d+|pad|start|end|begin|placeholder|soft_token|tokens?|context|here))?\|?>"
    r"|<\|media_\w+\|>|<im_(?:start|end|patch)>|<\|?(?:start|begin|end)_of_(?:image|video|audio)\|?>|<fake_token_around_image>"
    r"|\[(?:IMG|IMAGE)\]|(?<=<image>)(?:\./)?</image>",
    re.IGNORECASE,
)
"""Matches the media placeholders of other models and trainers.

These models and trainers are LLaVA, InternVL, InternLM, Phi, Gemma, Mistral, Qwen, GLM, Kimi,
Idefics, MiniCPM, DeepSeek and ms-swift.
"""
_OBJECTS = re.compile(r"<(bbox|ref-object|point|cot-process)>")
"""Matches the object placeholders that ms-swift fills from its column `objects`.

A tag that is followed by its closing tag </..> is part of a response's text instead.
"""


def find_media_placeholder(text: str) -> str:
    """Return the first media placeholder other than IMAGE_PLACEHOLDER, or "" if there is none."""
    return next((found[0] for found in _MEDIA.finditer(text) if found[0] != IMAGE_PLACEHOLDER), "")


def find_object_placeholder(text: str) -> str:
    """Return the first object placeholder, or "" if there is none."""
    return next((found[0] for found in _OBJECTS.finditer(text) if f"</{found[1]}>" not in text), "")
