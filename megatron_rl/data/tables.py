"""Reads the rows of text tables (.tsv, .csv), a format used by several benchmarks.

All values are text, and empty values are omitted. VLMEvalKit tables, which have the columns index
and image, store each image only once. An image value of at most 64 characters is the index of the
row that contains the image (vlmeval/dataset/image_base.py, 2025).
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from megatron_rl.data.file_formats import UnreadableFile

UNNAMED_COLUMN = "Unnamed: 0"
"""Name given to an unnamed first column, as in pandas.

pandas writes an unnamed column for the index of a table.
"""
INDEX, IMAGE = "index", "image"
MAX_REFERENCE_CHARS = 64
SEPARATORS = {".tsv": "\t", ".csv": ","}


class TableRows(Sequence[dict[str, str]]):
    """Rows of a table, each read from the file on access."""

    features: Mapping[str, str] = {}

    def __init__(self, path: Path, *, max_row_bytes: int) -> None:
        """Find the rows of the file.

        Raises:
            UnreadableFile: the first row does not name each column exactly once, a row is longer
                than `max_row_bytes`, or a row has more or fewer fields than the first row.
        """
        self.path, self._separator = path, SEPARATORS[path.suffix.casefold()]
        csv.field_size_limit(max_row_bytes)
        self._stamp = file_fingerprint(path)
        self._spans: list[tuple[int, int]] = []
        homes: dict[str, int] = {}
        referring: list[tuple[int, str]] = []
        with path.open("rb") as file:
            records = _records(file, self._separator, max_row_bytes=max_row_bytes)
            header, _ = next(records, ([], (0, 0)))
            self.names = [name.strip() for name in header]
            if len(header) > 1 and not self.names[0]:
                self.names[0] = UNNAMED_COLUMN
            _check_header(self.names, self._separator)
            if not all(self.names) or len(set(self.names)) < len(self.names) or not self.names:
                raise UnreadableFile(
                    f"its first row must contain each column name once; it contains {', '.join(self.names[:20]) or 'none'}"
                )
            for number, (fields, span) in enumerate(records):
                if len(fields) != len(self.names):
                    raise UnreadableFile(f"row {number} has {len(fields)} fields, but the first row names {len(self.names)} columns")
                self._spans.append(span)
                index, image = self._field(fields, INDEX), self._field(fields, IMAGE)
                if len(image) > MAX_REFERENCE_CHARS:
                    homes.setdefault(index, number)
                elif image:
                    referring.append((number, image))
        self._image_rows = {number: homes[image] for number, image in referring if image in homes}

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> dict[str, str]:
        """Return a row; raise ValueError if the file has changed since it was opened."""
        number = range(len(self))[index]
        row = self._read_row(number)
        if number in self._image_rows:
            row[IMAGE] = self._read_row(self._image_rows[number])[IMAGE]
        return row

    def _read_row(self, number: int) -> dict[str, str]:
        if file_fingerprint(self.path) != self._stamp:
            raise ValueError(
                f"{self.path.name} row {number}: the file has changed since the run began; rerun the same command to use the current file"
            )
        start, end = self._spans[number]
        with self.path.open("rb") as file:
            file.seek(start)
            text = file.read(end - start).decode()
        (fields,) = csv.reader([text], delimiter=self._separator)
        return {name: value for name, value in zip(self.names, fields, strict=True) if value}

    def _field(self, fields: Sequence[str], name: str) -> str:
        return fields[self.names.index(name)] if name in self.names else ""


def _check_header(names: Sequence[str], separator: str) -> None:
    """Raise UnreadableFile if the first row seems to use UTF-16 or a different separator."""
    if any("\0" in name for name in names):
        raise UnreadableFile("its first row contains NUL bytes; if the file is in UTF-16, convert it to UTF-8")
    found = [other for other in (";", "\t", "|", ",") if other != separator and len(names) == 1 and other in names[0]]
    if found:
        read = " or ".join(f"{each!r} in {suffix}" for suffix, each in SEPARATORS.items())
        raise UnreadableFile(f"its first row is separated by {found[0]!r}, but the separator must be {read}; convert or rename the file")


def file_fingerprint(path: Path) -> tuple[int, int]:
    """Return a file's size and its modification time in nanoseconds, to detect changes."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _records(file: BinaryIO, separator: str, *, max_row_bytes: int) -> Iterator[tuple[list[str], tuple[int, int]]]:
    """Yield the fields and the half-open byte range (start, end) of each non-blank record.

    The CSV reader consumes only the lines of the current record, so the position after reading a
    record is the end of the record.
    """
    at = 3 if file.read(3) == b"\xef\xbb\xbf" else 0
    file.seek(at)
    end = start = at

    def lines() -> Iterator[str]:
        nonlocal end
        while line := file.readline(max_row_bytes + 1):
            end += len(line)
            if end - start > max_row_bytes:
                raise UnreadableFile(f"contains a row of more than {max_row_bytes >> 20} MiB; check for an unclosed quotation mark")
            yield line.decode()

    try:
        for fields in csv.reader(lines(), delimiter=separator, strict=True):
            if fields:
                yield fields, (start, end)
            start = end
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"the row that begins at byte {start} is invalid ({error}); write the file in UTF-8") from error
    except csv.Error as error:
        raise UnreadableFile(f"the row that begins at byte {start} is invalid ({error})") from error
