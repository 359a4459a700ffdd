"""Names the columns that nothing reads, in one line for all rows of a data source, and the setting that ignores them."""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

IDENTIFIERS = {
    "id", "_id", "idx", "index", "uid", "uuid", "qid", "pid", "row_id", "sample_id", "question_id", "image_id", "source", "dataset",
    "split", "license", "__index_level_0__",
}  # fmt: skip
"""Columns that say which row it is or where it comes from, if they hold a short text or a number: they are not named."""
MAX_IDENTIFIER_CHARS = 100
_MOST_NAMES = 50
_PLAIN = re.compile(r"(?!(?:null|true|false|nan|inf)\Z)[A-Za-z_][\w.-]*", re.IGNORECASE | re.ASCII)
"""Names that hydra reads as text without quotes."""


def is_empty(value: object) -> bool:
    """Return True for a value that says nothing, as files with one type for all rows hold it. False and 0 say something."""
    return value in ("", "[]", "{}", None) or (isinstance(value, list | Mapping) and all(map(is_empty, _items(value))))


def _items(value: list | Mapping[str, object]) -> Iterable[object]:
    return value.values() if isinstance(value, Mapping) else value


def is_identifier(name: str, value: object) -> bool:
    is_short = isinstance(value, str) and len(value) <= MAX_IDENTIFIER_CHARS and "\n" not in value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return name.removeprefix("extra_info.").casefold() in IDENTIFIERS and (is_short or is_number)


class UnreadColumns:
    """Collects the unread columns of rows, but for those that task.data.columns.ignored names."""

    def __init__(self, ignored: Sequence[str] = ()) -> None:
        self._ignored = ignored
        self._first: dict[str, str] = {}
        """Column -> the first row that has it."""
        self._unread: set[str] = set()
        """All columns that were not read of some row."""

    def add(self, unread: Mapping[str, object], where: str) -> None:
        """Count the columns of a row that hold something. `unread`: their values."""
        self._unread |= unread.keys()
        for name, value in unread.items():
            if name not in self._first and name not in self._ignored and not is_empty(value) and not is_identifier(name, value):
                self._first[name] = where

    def format_lines(self, remedy: str) -> list[str]:
        """Return one line, or none. `remedy`: how such a column is read.

        Example: `q.jsonl row 0: columns level, topic are not read: REMEDY; 'task.data.columns.ignored=[level,topic]' ignores them`.
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
        """Return a line for each of the rows' columns that is read although it is to be ignored."""
        read = [name for name in self._ignored if name in {*columns} - self._unread]
        return [f"task.data.columns.ignored={name}: the column is read; take it out of this list, or remove the column" for name in read]


def quote_name(name: str) -> str:
    """Return a name as a list on the command line takes it, in quotes where it is no plain word."""
    return name if _PLAIN.fullmatch(name) else json.dumps(name, ensure_ascii=False)


class ImageColumnCounts:
    """Counts the rows without a picture, where others have one."""

    def __init__(self) -> None:
        self._columns: dict[str, None] = {}
        self._num_rows = self._num_without = 0
        self._first = ""

    def add(self, column: str, where: str) -> None:
        """Count a row. `column`: that of its pictures, "" where it has none."""
        self._num_rows += 1
        if column:
            self._columns[column] = None
        else:
            self._num_without += 1
            self._first = self._first or where

    def format_lines(self) -> list[str]:
        """Return one line where some rows have pictures and some have none.

        Example: `q.jsonl row 4: 1 of 20 rows have no picture in column image: the policy sees their text alone; ...`.
        """
        if not self._columns or not self._num_without:
            return []
        columns = f"column{'s' if len(self._columns) > 1 else ''} {' or '.join(self._columns)}"
        remedy = "the policy sees their text alone; name their pictures, or leave the rows out if they need one"
        return [f"{self._first}: {self._num_without} of {self._num_rows} rows have no picture in {columns}: {remedy}"]
