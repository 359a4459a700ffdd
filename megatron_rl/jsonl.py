"""Strict JSON lines, one record a line. Numbers that JSON lacks travel as the strings "NaN", "Infinity" and "-Infinity"."""

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

LACKING = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_line(record: object) -> str:
    """One line without its newline, in plain ASCII. Example: {"a": nan, "b": [1, -inf]} -> '{"a": "NaN", "b": [1, "-Infinity"]}'."""
    return json.dumps(_strict(record), allow_nan=False)


def to_number(value: float | str) -> float:
    """A number as it was before `to_line`: "NaN", "Infinity" and "-Infinity" become floats again."""
    return LACKING[value] if isinstance(value, str) else value


def read_lines(path: Path) -> list[dict]:
    """The records of all complete lines. A last line without a newline was cut off by a kill, or is being written: it is left out.

    ValueError, with file and line: one is not JSON.
    """
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} line {number}: {error}") from error
    return records


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a file so that it is the old one or the new one whenever the program dies; on a full disk OSError, and the old one."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def replace_lines(path: Path, records: Iterable[object]) -> None:
    """Write a whole file of records; see `replace_bytes`."""
    replace_bytes(path, "".join(to_line(record) + "\n" for record in records).encode("ascii"))


def _strict(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value
