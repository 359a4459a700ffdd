"""Finds the rows of a JSON file that is one object with numbered keys.

Example: `{"1": {...}, "2": {...}}`. MathVista and DynaMath are published in this form. The numbers
may have a common prefix, as in LogicVista: `{"v1_0": {...}, "v1_1": {...}}`.
"""

import json
import re
from pathlib import Path

from megatron_rl.data.tables import UnreadableFile

_CHUNK = 1 << 20
_FIRST_KEY = re.compile(r"\s*\{\s*\"([ !#-\[\]-~]{0,40}?)\d+\"\s*:", re.ASCII)
_KEY = re.compile(r"(\s*,)?\s*\"((?:[^\"\\]|\\.){0,200})\"\s*:\s*")
_END = re.compile(r"\s*\}\s*\Z")
_BYTE_ORDER_MARK = "\xef\xbb\xbf"


def key_prefix(path: Path) -> str | None:
    """Return the text before the numbers in a file's keys, or None if the keys are not numbered.

    Keys with a prefix count as numbered only if the first two keys (or the only key) have the same
    prefix and their values are objects. Otherwise the object may be a single row with a column such
    as `image_1`.
    """
    with path.open("rb") as file:
        start = file.read(_CHUNK).decode("latin-1").removeprefix(_BYTE_ORDER_MARK)
    first = _FIRST_KEY.match(start) if path.suffix == ".json" else None
    if first is None or not first[1]:
        return None if first is None else ""
    decoder, at, is_first = json.JSONDecoder(), start.index("{") + 1, True
    while (found := _next_value(decoder, start, at, is_first=is_first)) is not None:
        key, begin, at = found
        if not key.removeprefix(first[1]).isdecimal() or not key.startswith(first[1]) or start[begin] != "{":
            return None
        if not is_first:
            return first[1]
        is_first = False
    return None if is_first or not _END.match(start, at) else first[1]


def find_row_spans(path: Path, prefix: str, *, max_row_bytes: int) -> list[tuple[int, int, int]]:
    """Return the number and the half-open byte range (start, end) of each row, sorted by number.

    Every key of the file is `prefix` followed by the row's number.

    Raises:
        UnreadableFile: a key has another form or occurs twice, a value is not an object, two rows
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
                number = _key_number(key, prefix, text[start : start + 1], found)
                found[number] = (number, base + start, base + end)
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


def _key_number(key: str, prefix: str, first: str, found: dict[int, tuple[int, int, int]]) -> int:
    """Return the number in a key.

    Raise UnreadableFile if the key has another form, or if an earlier row has the same number. The
    value of the key must be an object; `first` is the first character of the value.
    """
    named = f"{prefix} and a whole number" if prefix else "a whole number"
    behind = f" after {prefix}" if prefix else ""
    remedy = f"the keys must be unique whole numbers{behind} and all values must be objects; a JSON list needs no keys"
    number = key.removeprefix(prefix)
    if not (key.startswith(prefix) and number.isdecimal() and len(number) <= 18) or (prefix and number != str(int(number))):
        raise UnreadableFile(f"the key {json.dumps(key[:40])} is not {named}; {remedy}")
    if int(number) in found:
        raise UnreadableFile(f"has the key {key} twice; {remedy}")
    if first != "{":
        raise UnreadableFile(f"the value of the key {key} is not an object; {remedy}")
    return int(number)
