"""Detects images, videos and audio in the values of a row.

Detection uses the type in the file's schema, the content, and the column name.
"""

import base64
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.data.column_names import PICTURE_SUFFIXES
from megatron_rl.data.image_bytes import MAGIC
from megatron_rl.data.literals import parse_literal
from megatron_rl.data.records import DataRecord

VIDEO_SUFFIXES = (".mp4", ".webm", ".mkv", ".avi", ".mov", ".m4v", ".mpg", ".mpeg")
AUDIO_SUFFIXES = (".wav", ".mp3", ".flac", ".ogg", ".opus", ".m4a", ".aac")
OTHER_PICTURES = (
    ".heic", ".heif", ".avif", ".jp2", ".jxl", ".ppm", ".pgm", ".pbm", ".svg", ".jfif", ".apng", ".ico", ".psd", ".exr", ".dcm",
)  # fmt: skip
SUFFIXES = {"pictures": (*PICTURE_SUFFIXES, *OTHER_PICTURES), "videos": VIDEO_SUFFIXES, "audio": AUDIO_SUFFIXES}
FEATURES = {"Image": "pictures", "Video": "videos", "Audio": "audio"}
"""Maps a media type of `datasets` to the kind of media."""
_CONTAINERS = {b"WEBP": "pictures", b"AVI ": "videos", b"WAVE": "audio"}
_MAGIC = {b"\x1aE\xdf\xa3": "videos", b"ID3": "audio", b"fLaC": "audio", b"OggS": "audio"}
_DECODED = re.compile(r".?PNG\r?\n\x1a\n|.{0,6}(?:JFIF|Exif)\0", re.DOTALL)
"""Matches the start of PNG and JPEG files that were decoded as text.

These characters are the same in every text encoding.
"""
_HEAD = 12
"""Number of leading bytes that identify the format of a file."""
_MEDIA_NAME = re.compile(r"(video|videos|clip|clips|audio|audios|sound|speech)(_?(path|url|file|bytes)s?)?(_?\d+)?")
MAX_PATH_CHARS = 4096
MAX_DEPTH, MAX_ITEMS = 12, 1024
"""Maximum nesting depth and maximum number of elements per level to inspect in a value.
"""
_MOST_PIXELS = 64
"""Maximum number of rows and columns of nested lists to inspect for pixels."""


@dataclass(slots=True, frozen=True)
class Media:
    """Pictures, videos or audio that `find_media` found in a value."""

    kind: str
    """Kind of media: "pictures", "videos" or "audio"."""
    description: str
    exists: bool = True
    """True unless the value is a web address or the name of a missing file."""


def find_media(value: object, record: DataRecord, name: str = "", *, depth: int = 0) -> Media | None:
    """Return the first media item in a value, or None if there is none.

    Nested values are searched down to depth MAX_DEPTH.
    """
    feature = record.features.get(name)
    if feature in FEATURES and value not in ("", [], {}):
        return Media(FEATURES[feature], f"has the type {feature} in the file's schema")
    if isinstance(value, bytes):
        kind = _kind_of_bytes(value)
        return Media(kind, f"contains the bytes of {kind}") if kind else Media("pictures", "contains bytes") if value else None
    if isinstance(value, str):
        held = parse_literal(value) if value.lstrip()[:1] in ("[", "{") else None
        return find_media(held, record, depth=depth + 1) if isinstance(held, Mapping | list) else _media_in_text(value, record)
    if isinstance(value, Mapping) and {"array", "sampling_rate"} <= value.keys():
        return Media("audio", "contains decoded audio")
    if depth >= MAX_DEPTH or not isinstance(value, Mapping | list):
        return None
    if isinstance(value, Mapping) and value and value.keys() <= {"bytes", "path"}:
        inner = [media for item in value.values() if (media := find_media(item, record, depth=depth + 1))]
        is_path = value.keys() == {"path"}  # a path alone may name any kind of file
        return inner[0] if inner else None if is_path else Media("pictures", "contains files in the format of datasets")
    if isinstance(value, list) and len(value) > _HEAD and all(isinstance(each, int) and 0 <= each < 256 for each in value[:_HEAD]):
        kind = _kind_of_bytes(bytes(value[:_HEAD]))
        return Media(kind, f"contains the bytes of {kind} as numbers") if kind else None
    if isinstance(value, list) and all(isinstance(each, int | float) for each in value[:MAX_ITEMS]):
        return None
    if _are_pixels(value):
        return Media("pictures", "looks like pixels, as lists of numbers")
    named = [(f"{name}.{key}", item) for key, item in value.items()] if isinstance(value, Mapping) else [(name, item) for item in value]
    found = (find_media(item, record, inner, depth=depth + 1) for inner, item in named[:MAX_ITEMS])
    return next((media for media in found if media), None)


def _are_pixels(value: object) -> bool:
    """Return True for nested lists that look like an image.

    The lists must have the shape [height, width, channels] or [channels, height, width]. All lists
    at the same nesting level must have the same length, which distinguishes images from bounding
    boxes.
    """
    if not (isinstance(value, list) and len(value) >= 2 and all(isinstance(row, list) and len(row) >= 2 for row in value)):
        return False
    widths = {len(row) for row in value}
    cells = [cell for row in value[:_MOST_PIXELS] for cell in row[:_MOST_PIXELS]]
    depths = {len(cell) if isinstance(cell, list) else 0 for cell in cells}
    are_numbers = all(isinstance(each, int | float) for cell in cells[:8] if isinstance(cell, list) for each in cell[:8])
    return len(widths) == len(depths) == 1 and min(depths) >= 3 and are_numbers


def _kind_of_bytes(value: bytes) -> str:
    if value.startswith(b"RIFF"):
        return _CONTAINERS.get(value[8:12], "")
    if value[4:8] == b"ftyp":
        return "pictures" if value[8:12] in (b"avif", b"heic", b"mif1") else "videos"
    known = next((kind for magic, kind in _MAGIC.items() if value.startswith(magic)), "")
    return known or ("pictures" if value.startswith(tuple(MAGIC)) else "")


def _media_in_text(text: str, record: DataRecord) -> Media | None:
    """Detect media in a text.

    The function recognizes data URLs, web addresses and file names that end in a media suffix,
    names of existing files, base64, and media bytes that were decoded as text.
    """
    head = text[:11].casefold()
    for kind, word in (("pictures", "image"), ("videos", "video"), ("audio", "audio")):
        if head.startswith(f"data:{word}/"[:11]):
            return Media(kind, f"contains {kind} as data: URLs")
    if len(text) <= MAX_PATH_CHARS and "\n" not in text and text.strip():
        is_url = re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", text) is not None
        bare = (re.split(r"[?#]", text)[0] if is_url else text).casefold()
        kind = next((kind for kind, suffixes in SUFFIXES.items() if bare.endswith(suffixes)), "")
        if is_url:
            return Media(kind, f"looks like web addresses of {kind}", exists=False) if kind else None
        if kind or ("/" in text and " " not in text) or re.fullmatch("[0-9a-f]{64}", text):
            found = _media_in_file(record, text, kind)
            if found or (kind and len(text.split()) <= 3):
                return found or Media(kind, f"looks like names of {kind} that do not exist", exists=False)
    return _media_in_base64(text)


def _media_in_file(record: DataRecord, text: str, kind: str) -> Media | None:
    """Return the media in the existing file that a text names, or None if there are none.

    If `kind` is "", the kind of media is detected from the first bytes of the file.
    """
    if "\0" in text or not os.path.isfile(path := record.folder / text):
        return None
    if not kind:
        try:
            with path.open("rb") as file:
                kind = _kind_of_bytes(file.read(_HEAD))
        except OSError:
            return None
    return Media(kind, f"looks like paths of {kind} that exist") if kind else None


def _media_in_base64(text: str) -> Media | None:
    if re.match(r"(b['\"])?(\\x89PNG|\\xff\\xd8\\xff)|b['\"](GIF8|RIFF)", text):
        return Media("pictures", "contains the Python representation of image bytes (b'...')")
    if len(text) > 64 and re.fullmatch("[0-9a-fA-F]{64}", text[:64]) and (kind := _kind_of_bytes(bytes.fromhex(text[: 2 * _HEAD]))):
        return Media(kind, f"contains {kind} as hexadecimal digits")
    if kind := _kind_of_characters(text):
        return Media(kind, f"contains the bytes of {kind} as text")
    start = re.sub(r"\s", "", text[:64]).replace("-", "+").replace("_", "/")
    if len(text) < 64 or not re.fullmatch(r"[A-Za-z0-9+/]{24,}={0,2}", start):
        return None
    content = base64.b64decode(start[:24])
    is_word = content.startswith(b"BM") and content[6:10] != bytes(4)  # the letters BM alone do not identify a BMP
    kind = "" if is_word else _kind_of_bytes(content)
    return Media(kind, f"contains {kind} in base64") if kind else None


def _kind_of_characters(text: str) -> str:
    """Return the kind of media if the text is media bytes that were decoded as text, else "".

    The bytes may have been decoded as Latin-1, or in an encoding that drops invalid bytes.
    """
    if text[:_HEAD].isprintable():
        return ""
    if _DECODED.match(text):
        return "pictures"
    content = text[:_HEAD].encode("latin-1", "replace")
    return "" if content.startswith(b"BM") and content[6:10] != bytes(4) else _kind_of_bytes(content)


def find_media_by_name(name: str, value: object) -> Media | None:
    """Return the media suggested by a column's name, or None.

    The value must be a text without spaces, a list or a mapping; other values cannot name or
    contain media.
    """
    found = _MEDIA_NAME.fullmatch(name.removeprefix("extra_info.").casefold())
    are_words = isinstance(value, str) and " " in value.strip()
    if not found or are_words or not isinstance(value, str | list | Mapping):
        return None
    kind = "videos" if found[1].startswith(("video", "clip")) else "audio"
    return Media(kind, f"has a name typical of {kind}")
