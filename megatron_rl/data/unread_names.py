"""Reports the columns that are not read in one line, with the setting that suppresses this line."""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

IDENTIFIERS = {
    "id", "_id", "idx", "index", "uid", "uuid", "qid", "pid", "row_id", "sample_id", "question_id", "image_id", "source", "dataset",
    "split", "license", "__index_level_0__",
}  # fmt: skip
"""Names of columns that identify a row or its origin.

Such a column is not reported if its value is a short text or a number.
"""
MAX_IDENTIFIER_CHARS = 100
_MOST_NAMES = 50
_PLAIN = re.compile(r"(?!(?:null|true|false|nan|inf)\Z)[A-Za-z_][\w.-]*", re.IGNORECASE | re.ASCII)
"""Matches names that Hydra parses as text without quotes."""


def is_empty(value: object) -> bool:
    """Return True for a value without content.

    Empty values occur in file formats in which all rows have the same columns. The values False and
    0 count as content.
    """
    return value in ("", "[]", "{}", None) or (isinstance(value, list | Mapping) and all(map(is_empty, _items(value))))


def _items(value: list | Mapping[str, object]) -> Iterable[object]:
    return value.values() if isinstance(value, Mapping) else value


def is_identifier(name: str, value: object) -> bool:
    """Return True if the value is a short text or a number and the column name looks like an ID."""
    is_short = isinstance(value, str) and len(value) <= MAX_IDENTIFIER_CHARS and "\n" not in value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return name.removeprefix("extra_info.").casefold() in IDENTIFIERS and (is_short or is_number)


class UnreadColumns:
    """Collects the names of columns that are not read.

    Columns listed in task.data.columns.ignored are left out.
    """

    def __init__(self, ignored: Sequence[str] = ()) -> None:
        self._ignored = ignored
        self._first: dict[str, str] = {}
        """Maps a column to the location of the first row with a value in it."""
        self._unread: set[str] = set()
        """Names of the columns that were not read in at least one row."""

    def add(self, unread: Mapping[str, object], where: str) -> None:
        """Record the non-empty columns of a row that are not read.

        Args:
            unread: values that are not read, keyed by column.
            where: file and row.
        """
        self._unread |= unread.keys()
        for name, value in unread.items():
            if name not in self._first and name not in self._ignored and not is_empty(value) and not is_identifier(name, value):
                self._first[name] = where

    def format_lines(self, remedy: str) -> list[str]:
        """Return a list with one line about the columns that are not read, or an empty list.

        `remedy` explains how to read the columns.

        Example: `q.jsonl row 0: columns level, topic are not read: ...;
        'task.data.columns.ignored=[level,topic]' ignores them`.
        """
        if not self._first:
            return []
        names = [*self._first][:_MOST_NAMES]
        more = len(self._first) - len(names)
        listed = ", ".join(map(quote_name, names)) + (f" and {more} more" if more else "")
        verb, them = ("columns", "are") if len(self._first) > 1 else ("column", "is"), "them" if len(self._first) > 1 else "it"
        setting = shlex.quote(f"task.data.columns.ignored=[{','.join(map(quote_name, [*self._ignored, *names]))}]")
        where = next(iter(self._first.values()))
        return [f"{where}: {verb[0]} {listed} {verb[1]} not read: {remedy}; {setting} ignores {them}"]

    def errors(self, columns: Iterable[str]) -> list[str]:
        """Return an error for each column in task.data.columns.ignored that the loader reads."""
        read = [name for name in self._ignored if name in {*columns} - self._unread]
        return [f"task.data.columns.ignored={name}: the column is read; remove it from this list, or remove the column" for name in read]


def quote_name(name: str) -> str:
    """Quote a name for a list on the command line, unless the name is a plain word."""
    return name if _PLAIN.fullmatch(name) else json.dumps(name, ensure_ascii=False)


class ImageColumnCounts:
    """Counts the rows without images in data sets where other rows have images."""

    def __init__(self) -> None:
        self._columns: dict[str, None] = {}
        self._num_rows = self._num_without = 0
        self._first = ""

    def add(self, column: str, where: str) -> None:
        """Count a row by its image column.

        `column` is "" if the row has no images.
        """
        self._num_rows += 1
        if column:
            self._columns[column] = None
        else:
            self._num_without += 1
            self._first = self._first or where

    def format_lines(self) -> list[str]:
        """Return a list with one line if only some of the rows have images, else an empty list.

        Example: `q.jsonl row 4: 1 of 20 rows have no image in column image: the policy sees only
        their text; ...`.
        """
        if not self._columns or not self._num_without:
            return []
        columns = f"column{'s' if len(self._columns) > 1 else ''} {' or '.join(self._columns)}"
        remedy = "the policy sees only their text; name their images, or remove the rows that need one"
        return [f"{self._first}: {self._num_without} of {self._num_rows} rows have no image in {columns}: {remedy}"]
