"""Finds the rows of a JSON file that is one list of objects.

Rows must be separated by exactly one comma, and nothing may follow the closing bracket.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatron_rl.data.file_formats import UnreadableFile

_CHUNK = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")
_REMEDY = "write all rows into one list, separated by commas, or one object per line without brackets"


def list_spans(path: Path, *, max_row_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the half-open byte range (start, end) of each list element.

    The file is decoded as Latin-1, in which every character is one byte, so positions in the text
    are byte offsets.

    Raises:
        UnreadableFile: the file is not a list, contains more than one list, or is truncated. The
            message contains the byte position.
    """
    decoder = json.JSONDecoder()
    with path.open("rb") as file:
        text, base, num_rows = file.read(_CHUNK).decode("latin-1"), 0, 0
        at = text.index("[") + 1
        while True:
            start = _row_start(text, at, base, num_rows)
            if start is not None and text[start : start + 1] == "]":
                _check_end(file, text[start + 1 :], base + start + 1)
                return
            try:
                _, end = decoder.raw_decode(text, len(text) if start is None else start)
                is_whole, reason = end < len(text), "the closing ] is missing"  # a number at the end of the text may continue
            except (ValueError, RecursionError) as error:
                is_whole, reason = False, str(error)
            if is_whole and start is not None:
                yield base + start, base + end
                at, num_rows = end, num_rows + 1
                continue
            more = file.read(max(_CHUNK, len(text) - at)).decode("latin-1")
            if not more:
                place = base + (at if start is None else start)
                raise UnreadableFile(f"is truncated or not a JSON list: no complete row begins at byte {place} ({reason})")
            text, base, at = text[at:] + more, base + at, 0
            if len(text) - len(more) > max_row_bytes:
                raise UnreadableFile(f"contains a row of more than {max_row_bytes >> 20} MiB; write one row per line")


def _row_start(text: str, at: int, base: int, num_rows: int) -> int | None:
    """Return the position of the next row or closing bracket, or None if the text contains neither.

    Raises:
        UnreadableFile: the next text is neither a row nor the closing bracket.
    """
    at = _skip_space(text, at)
    if at == len(text) or text[at] == "]":
        return at if at < len(text) else None
    if num_rows:
        if text[at] != ",":
            raise UnreadableFile(f"is not a JSON list: no comma between row {num_rows - 1} and the text at byte {base + at}; {_REMEDY}")
        at = _skip_space(text, at + 1)
    if text[at : at + 1] in (",", "]"):
        raise UnreadableFile(f"is not a JSON list: no row before the {text[at]} at byte {base + at}; add the row, or remove the comma")
    return at if at < len(text) else None


def _skip_space(text: str, at: int) -> int:
    """Return the position of the first character from `at` on that is not white space."""
    found = _SPACE.match(text, at)
    assert found is not None, "the pattern matches an empty text too"
    return found.end()


def _check_end(file: BinaryIO, rest: str, at: int) -> None:
    """Raise UnreadableFile if anything other than white space follows the list.

    `rest` is the text that was already read after the list; it begins at byte `at`.
    """
    while (blank := _skip_space(rest, 0)) == len(rest):
        at += len(rest)
        rest = file.read(_CHUNK).decode("latin-1")
        if not rest:
            return
    raise UnreadableFile(f"contains text at byte {at + blank}, after the closing ] of its list; {_REMEDY}")
