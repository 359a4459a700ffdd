"""Texts and images in the result of an MCP tool.

Results are untrusted: texts are truncated, and images are decoded with the limits of
data/images.py. What is left out is noted in the text.
"""

import base64
import binascii
from collections.abc import Sequence

from mcp.types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from PIL.Image import Image as Picture

from megatron_rl.config import ToolSettings
from megatron_rl.data.images import StoredImage
from megatron_rl.errors import InfraError

NO_OUTPUT_TEXT = "The tool gave nothing back."


def read_result(result: CallToolResult, settings: ToolSettings) -> tuple[str, list[Picture]]:
    """Return the text of a result, with notes on what was left out, and its images."""
    texts: list[str] = []
    encoded: list[str] = []
    notes: list[str] = []
    for content in result.content:
        match content:
            case TextContent(text=text) | EmbeddedResource(resource=TextResourceContents(text=text)):
                texts.append(text)
            case ImageContent(data=data):
                encoded.append(data)
            case EmbeddedResource(resource=BlobResourceContents(blob=blob, mime_type=str(kind))) if kind.startswith("image/"):
                encoded.append(blob)
            case AudioContent(mime_type=kind):
                notes.append(f"audio of type {kind[:60]} was left out")
            case ResourceLink(uri=uri):
                texts.append(uri)
            case EmbeddedResource(resource=resource):
                notes.append(f"a file of type {(resource.mime_type or 'unknown')[:60]} was left out")
    pictures, dropped = decode_images(encoded, settings)
    lines = [truncate_text("\n".join(texts), settings.max_chars)] if any(texts) else []
    lines += [f"({note})" for note in (*notes, *dropped)]
    if not lines and not pictures:
        lines = [NO_OUTPUT_TEXT]
    return "\n".join(lines).encode("utf-8", "replace").decode(), pictures


def decode_images(encoded: Sequence[str], settings: ToolSettings) -> tuple[list[Picture], list[str]]:
    """Decode base64 images within the limits; return them and notes on those that are left out."""
    pictures: list[Picture] = []
    notes: list[str] = []
    pixels = 0
    for number, data in enumerate(encoded[: settings.max_images], start=1):
        where = f"image {number} of the result"
        try:
            stored = StoredImage(base64.b64decode(data, validate=True), where)
            width, height = stored.size()
            if pixels + width * height > settings.max_pixels:
                notes.append(f"{where} was left out: {width}x{height} pixels; a result may have {settings.max_pixels} pixels in total")
                continue
            pictures.append(stored.open())
            pixels += width * height
        except binascii.Error as error:
            notes.append(f"{where} was left out: it is not base64 ({error})")
        except (ValueError, InfraError) as error:
            notes.append(f"{where} was left out: {str(error).removeprefix(where + ': ')}")
    if len(encoded) > settings.max_images:
        notes.append(f"{len(encoded) - settings.max_images} images were left out: a result may have {settings.max_images} images")
    return pictures, notes


def truncate_text(text: str, max_chars: int) -> str:
    """Return the text or, if it is longer than `max_chars`, its first and last half of it."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[: max_chars - half]}\n[... {len(text) - max_chars} characters were left out ...]\n{text[len(text) - half :]}"
