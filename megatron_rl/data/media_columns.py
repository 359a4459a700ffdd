"""Finds pictures, videos and audio in columns that nobody reads, by the column's name or by what it holds."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_rl.data.images import MAGIC

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
CLIP_SUFFIXES = (
    ".mp4", ".webm", ".mkv", ".avi", ".mov", ".m4v", ".mpg", ".mpeg", ".wav", ".mp3", ".flac", ".ogg", ".m4a", ".opus", ".heic", ".npy",
    ".npz", ".svg", ".pdf",
)  # fmt: skip
MEDIA_NAME = re.compile(r"(image|img|picture|photo|video|audio|clip|frame|wav)s?(_?(path|file|url|byte|data)s?|_?\d+)?|pixel_values")
"""Names of columns that hold media whatever their values are."""
PROVENANCE = re.compile(r"(.*_)?(id|ids|source|sources|url|dataset|split|license)")
"""Names of columns that may mention a file that is not there: where a row comes from."""
_BASE64 = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "SUkqA", "TU0AK")
"""What PNG, JPEG, GIF, WEBP and TIFF begin with, in base64."""
_MIN_BASE64 = 64
_MAX_PATH = 1024


def find_media(columns: Mapping[str, object], *, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each column that holds media, and what it holds in words. Relative paths start at `folder`.

    Example: {"video": "a.mp4", "id": "a.png"} gives ("video", "'a.mp4'").
    """
    for name, value in columns.items():
        is_named = MEDIA_NAME.fullmatch(name.lower()) and not isinstance(value, bool | int | float) and value not in ("", [], {})
        found = _find(value, folder) or (_in_words(value) if is_named else "")
        is_mentioned = isinstance(value, str) and PROVENANCE.fullmatch(name.lower()) and not os.path.isfile(folder / value)
        if found and (is_named or not is_mentioned):
            yield name, found


def _find(value: object, folder: Path) -> str:
    if isinstance(value, bytes):
        return "bytes"
    if isinstance(value, str):
        return _in_words(value) if _is_media(value, folder) else ""
    if isinstance(value, Mapping):
        if value.keys() & {"bytes", "path"} and value.keys() <= {"bytes", "path"}:
            return "a file of datasets"
        if "sampling_rate" in value:
            return "audio of datasets"
        return next((found for _, found in find_media(value, folder=folder)), "")
    if isinstance(value, list):
        return next(filter(None, (_find(item, folder) for item in value)), "")
    return ""


def _is_media(text: str, folder: Path) -> bool:
    if re.match("data:(image|video|audio)/", text):
        return True
    if len(text) >= _MIN_BASE64 and text.startswith(_BASE64) and not re.search(r"\s", text[:_MIN_BASE64]):
        return True
    if len(text) > _MAX_PATH or "\n" in text:
        return False
    if text.lower().partition("?")[0].endswith(PICTURE_SUFFIXES + CLIP_SUFFIXES):
        return " " not in text or os.path.isfile(folder / text)
    is_path = ("/" in text and not re.search(r"\s", text)) or re.fullmatch("[0-9a-f]{64}", text)
    return bool(is_path) and _begins_as_picture(folder / text)


def _begins_as_picture(path: Path) -> bool:
    if not os.path.isfile(path):  # Path.is_file raises where a name is too long
        return False
    with path.open("rb") as file:
        return file.read(12).startswith(MAGIC)


def _in_words(value: object) -> str:
    words = repr(value)
    return words if len(words) <= 60 else f"{words[:57]}..."
