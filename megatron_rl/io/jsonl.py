"""Strict JSON lines with one record per line, and untrusted JSON files.

Numbers that JSON lacks are written as the strings "NaN", "Infinity" and "-Infinity".
"""

import errno
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_rl.io.bounded_files import open_regular, read_bytes

MAX_LINE_BYTES = 64 << 20
"""Maximum size of a line in bytes; a rollout of a million tokens has 40 MB."""
MAX_LINES_BYTES = 1 << 30
"""Maximum size in bytes of a file of lines that is read whole."""
MAX_DEPTH = 64
"""Maximum nesting depth of objects and lists in a file of settings or names."""
NON_FINITE_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Maps the strings of numbers that JSON lacks to their values."""

BROKEN_DISK = "the disk has an error (dmesg says which): check it and mount it anew, or choose another folder"
"""Remedy for a write that fails, and for one that the kernel refuses because others have failed."""


def to_json_line(record: object) -> str:
    """Return a record as one line of plain ASCII, without the newline.

    Example: {"a": nan, "b": [1, -inf]} -> '{"a": "NaN", "b": [1, "-Infinity"]}'.
    """
    return json.dumps(_replace_non_finite(record), allow_nan=False)


def parse_number(value: float | str) -> float:
    """Return a number as it was before `to_json_line`.

    "NaN", "Infinity" and "-Infinity" become floats again.

    Raises:
        ValueError: It is no number.
    """
    number = NON_FINITE_NUMBERS.get(value) if isinstance(value, str) else value
    if not isinstance(number, int | float) or (isinstance(number, int) and not -(1 << 63) <= number < 1 << 63):
        raise ValueError(f"{str(value)[:40]!r} is no number")
    return number


def iterate_lines(path: Path, *, max_line_bytes: int = MAX_LINE_BYTES, at_most: int = MAX_LINES_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield each complete line with its number, from 1.

    A last line without a newline was cut off when its writer was killed, or is being written: it is
    left out.

    Raises:
        ValueError: A line, or the whole file, has too many bytes. The message names file and line.
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
    """Return the records of `iterate_lines`.

    Raises:
        ValueError: A line is not JSON or too long, or it is no regular file. The message names file
            and line.
    """
    records = []
    for number, line in iterate_lines(path, max_line_bytes=max_line_bytes):
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} line {number}: {error}") from error
    return records


def read_json(path: Path, *, at_most: int = 16 << 20) -> object:
    """Return the content of an untrusted JSON file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It has more than `at_most` bytes, is no JSON, or is nested deeper than
            MAX_DEPTH, which recursive code can process. The message is worded to follow the file's
            name.
    """
    content = read_bytes(path, at_most=at_most)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from error
    level = [found]
    for _ in range(MAX_DEPTH):
        level = [item for part in level if isinstance(part, dict | list) for item in (part.values() if isinstance(part, dict) else part)]
        if not level:
            return found
    raise ValueError(f"is nested deeper than {MAX_DEPTH}")


def write_error_line(key: str, path: Path, error: OSError) -> str:
    """Return the error line for a folder or file of a setting that could not be written."""
    is_broken = any(os.strerror(number) in str(error) for number in (errno.EIO, errno.EROFS))
    remedy = BROKEN_DISK if is_broken else "free space or choose another folder"
    return f"{key}={path}: could not be written ({error}); {remedy}"


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is the old or the new one whenever the program dies.

    Raises:
        OSError: The disk is full, for example. Only the old file is left.
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
    """Write a whole file of records with `write_bytes_atomically`."""
    write_bytes_atomically(path, "".join(to_json_line(record) + "\n" for record in records).encode("ascii"))


def _replace_non_finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return value
