"""Finds the rows of a JSON file that is one object with numeric keys.

Example: `{"1": {...}, "2": {...}}`. MathVista and DynaMath are published in this form.
"""

import json
import re
from pathlib import Path

from megatron_rl.data.tables import UnreadableFile

_CHUNK = 1 << 20
_FIRST_KEY = re.compile(r"\s*\{\s*\"\d+\"\s*:")
_KEY = re.compile(r"(\s*,)?\s*\"((?:[^\"\\]|\\.){0,200})\"\s*:\s*")
_END = re.compile(r"\s*\}\s*\Z")
_BYTE_ORDER_MARK = "\xef\xbb\xbf"


def is_keyed_json(path: Path) -> bool:
    """Return True for a .json file that is an object whose first key is an integer."""
    with path.open("rb") as file:
        start = file.read(_CHUNK).decode("latin-1").removeprefix(_BYTE_ORDER_MARK)
    return path.suffix == ".json" and _FIRST_KEY.match(start) is not None


def find_row_spans(path: Path, *, max_row_bytes: int) -> list[tuple[int, int, int]]:
    """Return the key and the half-open byte range (start, end) of each row, sorted by key.

    Raises:
        UnreadableFile: a key is not an integer or occurs twice, a value is not an object, two rows
            are not separated by exactly one comma, the file is truncated, or text follows the
            object.
    """
    found: dict[int, tuple[int, int, int]] = {}
    decoder = json.JSONDecoder()
    with path.open("rb") as file:
        text, base = file.read(_CHUNK).decode("latin-1"), 0
        at = text.index("{") + 1
        while True:
            complete = _next_value(decoder, text, at, is_first=not found)
            if complete is not None:
                key, start, end = complete
                _check_key(key, text[start : start + 1], found)
                found[int(key)] = (int(key), base + start, base + end)
                at = end
                continue
            more = file.read(max(_CHUNK, len(text) - at)).decode("latin-1")
            if not more:
                break
            text, base, at = text[at:] + more, base + at, 0
            if len(text) - len(more) > max_row_bytes:
                raise UnreadableFile(f"contains a row of more than {max_row_bytes >> 20} MiB; write one row per line")
    if not _END.match(text, at):
        raise UnreadableFile(f"is truncated or not valid JSON: byte {base + at} is neither the start of a row nor the end of the object")
    return [found[key] for key in sorted(found)]


def _next_value(decoder: json.JSONDecoder, text: str, at: int, *, is_first: bool) -> tuple[str, int, int] | None:
    """Return the key and the half-open range (start, end) of the next value.

    Return None if the text does not contain the whole value, or if the comma before the key is
    missing or repeated. The first key must have no comma before it. The file is decoded as Latin-1,
    in which every character is one byte, so positions in the text are byte offsets.
    """
    key = _KEY.match(text, at)
    if key is None or (key[1] is None) != is_first:
        return None
    try:
        _, end = decoder.raw_decode(text, key.end())
    except (ValueError, RecursionError):
        return None
    # A number or literal at the end of the text may continue in the next chunk.
    return (key[2], key.end(), end) if end < len(text) else None


def _check_key(key: str, first: str, found: dict[int, tuple[int, int, int]]) -> None:
    """Raise UnreadableFile if the key is not an integer, or if an earlier row has the same key.

    The value of the key must be an object; `first` is the first character of the value.
    """
    remedy = "the keys must be unique whole numbers and all values must be objects; a JSON list needs no keys"
    if not (key.isdecimal() and len(key) <= 18):
        raise UnreadableFile(f"the key {json.dumps(key[:40])} is not a whole number; {remedy}")
    if int(key) in found:
        raise UnreadableFile(f"has the key {key} twice; {remedy}")
    if first != "{":
        raise UnreadableFile(f"the value of the key {key} is not an object; {remedy}")
