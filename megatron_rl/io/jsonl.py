"""Reads and writes strict JSON lines, one record per line, and reads untrusted JSON files.

NaN and infinite numbers, which JSON does not support, are written as the strings "NaN", "Infinity"
and "-Infinity".
"""

import errno
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_rl.io.bounded_files import open_regular, read_bytes

MAX_LINE_BYTES = 64 << 20
"""Maximum size of a line in bytes; a rollout of a million tokens takes 40 MB."""
MAX_LINES_BYTES = 1 << 30
"""Maximum size of a JSON Lines file in bytes."""
MAX_DEPTH = 64
"""Maximum nesting depth of objects and lists in a file that `read_json` reads."""
NON_FINITE_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Maps the strings that stand for NaN and infinite numbers to the numbers."""

BROKEN_DISK = "the disk has an error (see dmesg): check and remount it, or choose another folder"
"""Fix that is suggested if a write fails with an I/O error, or if a write fails because the kernel
has made the file system read-only after earlier errors.
"""


def to_json_line(record: object) -> str:
    """Return a record as one line of plain ASCII, without the newline.

    Example: {"a": nan, "b": [1, -inf]} -> '{"a": "NaN", "b": [1, "-Infinity"]}'.
    """
    return json.dumps(_replace_non_finite(record), allow_nan=False)


def parse_number(value: float | str) -> float:
    """Convert a value written by `to_json_line` back to a number.

    The strings "NaN", "Infinity" and "-Infinity" become floats again.

    Raises:
        ValueError: `value` is not a number, or is an integer that does not fit into 64 bits.
    """
    number = NON_FINITE_NUMBERS.get(value) if isinstance(value, str) else value
    if not isinstance(number, int | float) or (isinstance(number, int) and not -(1 << 63) <= number < 1 << 63):
        raise ValueError(f"{str(value)[:40]!r} is not a number")
    return number


def iterate_lines(path: Path, *, max_line_bytes: int = MAX_LINE_BYTES, at_most: int = MAX_LINES_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield each complete line with its one-based line number.

    A last line without a newline is skipped: the line is still being written, or was cut off when
    its writer was killed.

    Raises:
        ValueError: A line or the whole file has too many bytes, or `path` is not a regular file.
            The message names the file and the line.
    """
    left = at_most
    try:
        opened = open_regular(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    with opened as file:
        for number, line in enumerate(iter(lambda: file.readline(max_line_bytes), b""), 1):
            left -= len(line)
            if left < 0:
                raise ValueError(f"{path} line {number}: the file has more than {at_most} bytes")
            if line.endswith(b"\n"):
                yield number, line
            elif len(line) == max_line_bytes:
                raise ValueError(f"{path} line {number}: has more than {max_line_bytes} bytes")


def read_lines(path: Path, *, max_line_bytes: int = MAX_LINE_BYTES) -> list[dict]:
    """Return the parsed records of a JSON Lines file, read with `iterate_lines`.

    Raises:
        ValueError: A line is not valid JSON or is too long, or `path` is not a regular file. The
            message names the file and the line.
    """
    records = []
    for number, line in iterate_lines(path, max_line_bytes=max_line_bytes):
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} line {number}: {error}") from error
    return records


def read_json(path: Path, *, at_most: int = 16 << 20) -> Any:
    """Return the content of an untrusted JSON file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file has more than `at_most` bytes, is not valid JSON, or is nested deeper
            than MAX_DEPTH, a depth that recursive code can still process. The message omits the
            file's name, which the caller must prepend.
    """
    content = read_bytes(path, at_most=at_most)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {error}") from error
    level = [found]
    for _ in range(MAX_DEPTH):
        level = [item for part in level if isinstance(part, dict | list) for item in (part.values() if isinstance(part, dict) else part)]
        if not level:
            return found
    raise ValueError(f"is nested deeper than {MAX_DEPTH}")


def write_error_line(key: str, path: Path, error: OSError) -> str:
    """Return an error message for a folder or file that could not be written.

    `key` is the name of the setting that contains the path.
    """
    is_broken = any(os.strerror(number) in str(error) for number in (errno.EIO, errno.EROFS))
    remedy = BROKEN_DISK if is_broken else "free space or choose another folder"
    return f"{key}={path}: could not be written ({error}); {remedy}"


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically: after a crash, the file has either its old or its new content.

    Raises:
        OSError: The file could not be written, for example because the disk is full. The old file
            is unchanged.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def write_lines_atomically(path: Path, records: Iterable[object]) -> None:
    """Write records as a JSON Lines file, with `write_bytes_atomically`."""
    write_bytes_atomically(path, "".join(to_json_line(record) + "\n" for record in records).encode("ascii"))


def _replace_non_finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return value
