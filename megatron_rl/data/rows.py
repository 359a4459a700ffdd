"""Reads the rows of JSON, JSON Lines, CSV, TSV, Parquet and Arrow files one at a time.

Rows are not kept in memory. JSON files and tables (tables.py) are read in place, and only the
position of each row is kept (16 bytes per row). A Parquet page cannot be read from the middle, so a
Parquet file is copied once to an Arrow file with one record batch per row. The copies are cached in
the temporary folder (TMPDIR), and all processes on a machine share this cache. Copying needs
several times as much memory as the file's largest page. A page contains 1,024 rows in files written
by pyarrow. The memory, disk space and time spent on a file are limited in proportion to its size
(parquet_copy.py).

Row numbers start at 0, as in pandas. Keys with null values are removed, so a row is the same in all
formats.
"""

import fcntl
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from megatron_rl.config import require
from megatron_rl.data import parquet_copy
from megatron_rl.data.decimal_forms import WrittenNumber, with_decimal_forms
from megatron_rl.data.features import Features, media_types, name_labels, parse_features, repeated_name
from megatron_rl.data.file_formats import check_format
from megatron_rl.data.images import shorten
from megatron_rl.data.keyed_rows import find_row_spans, key_prefix
from megatron_rl.data.list_rows import list_spans
from megatron_rl.data.tables import SEPARATORS, TableRows, UnreadableFile, file_fingerprint

JsonRow = Mapping[str, Any]
MAX_ROW_BYTES = 256 << 20
"""Maximum size of a JSON row in bytes.

A longer row indicates missing line breaks or a missing closing bracket.
"""
_CHUNK = 1 << 20
_ARROW_MAGIC = b"ARROW1"
_SPACE = " \t\r\n"


def open_rows(path: Path, *, key: str = "task.data") -> "JsonRows | TableRows | ParquetRows | ArrowRows":
    """Return the rows of a file.

    A row that is not a JSON object raises an error only when the row is read.

    Raises:
        ValueError: the file does not exist or has an invalid format. The message names the setting
            `key`.
    """
    require(path.is_file(), key, path, "no such file")
    suffix = path.suffix.casefold()
    try:
        check_format(path)
        if suffix == ".arrow":
            return ArrowRows(path)
        if suffix in SEPARATORS:
            return TableRows(path, max_row_bytes=MAX_ROW_BYTES)
        return ParquetRows(path) if suffix == ".parquet" else JsonRows(path)
    except UnreadableFile as error:
        raise ValueError(f"{key}={path}: {error}") from error


class JsonRows(Sequence[JsonRow]):
    """Rows of a JSON file.

    The file is a list of objects or has one object per line. A .json file may also contain one row
    as an object on several lines, or one object that maps numbered keys to rows (keyed_rows.py). A
    key becomes the `id` of a row without an `id`. The file is opened for each row, so that
    instances can be pickled and shared by threads. If the file has changed, reading a row raises
    ValueError, because the stored row positions are no longer valid.
    """

    features: Mapping[str, str] = {}

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = file_fingerprint(path)
        self._ends = array("q")
        self._starts = array("q")
        self._keys = array("q")
        self._prefix = key_prefix(path)
        if self._prefix is not None:
            for key, start, end in find_row_spans(path, self._prefix, max_row_bytes=MAX_ROW_BYTES):
                self._keys.append(key)
                self._starts.append(start)
                self._ends.append(end)
            return
        with path.open("rb") as file:
            first = file.read(_CHUNK).decode("latin-1").removeprefix("\xef\xbb\xbf").lstrip(_SPACE)[:1]
        for start, end in list_spans(path, max_row_bytes=MAX_ROW_BYTES) if first == "[" else _object_span(path) or _line_spans(path):
            self._starts.append(start)
            self._ends.append(end)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> JsonRow:
        start, end = self._starts[index], self._ends[index]
        if file_fingerprint(self.path) != self._stamp:
            raise ValueError(
                f"{self.path.name} row {index}: the file has changed since the run began; rerun the same command to use the current file"
            )
        with self.path.open("rb") as file:
            file.seek(start)
            text = file.read(end - start)
        try:
            row = drop_nulls(json.loads(text, object_pairs_hook=_unique_keys, parse_float=WrittenNumber))
        except _RepeatedKey as error:
            raise ValueError(f"{self.path.name} row {index}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.path.name} row {index}: is not valid JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{self.path.name} row {index}: must be a JSON object, not {type(row).__name__}")
        return {"id": f"{self._prefix}{self._keys[index]}", **row} if self._keys else row


class ParquetRows(Sequence[JsonRow]):
    """Rows of a Parquet file, read from an Arrow copy of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = pa.ipc.open_file(pa.OSFile(str(_arrow_copy(path))))
        _check_column_names(self._reader.schema)
        self._features = parse_features(self._reader.schema.metadata)
        self.features = media_types(self._features)

    def __reduce__(self) -> tuple:
        return ParquetRows, (self.path,)

    def __len__(self) -> int:
        return self._reader.num_record_batches

    def __getitem__(self, index: int) -> JsonRow:
        number = range(len(self))[index]
        return _to_json_row(self._reader.get_batch(number), self._features, where=f"{self.path.name} row {number}")


class ArrowRows(Sequence[JsonRow]):
    """Rows of an Arrow file, read in place.

    The file is in Arrow's stream format, as written by `datasets`, or in Arrow's file format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            source = pa.memory_map(str(path))
            is_file = source.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
            source.seek(8 if is_file else 0)
            _check_decompressed_size(pa.ipc.MessageReader.open_stream(source), source.size())
            source.seek(0)
            self._table = (pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)).read_all()
            if self._table.num_rows > 8 * source.size():  # columns of nulls or of a single run take no bytes
                raise UnreadableFile(f"has {source.size()} bytes but claims to contain {self._table.num_rows} rows; write the file again")
            _check_column_names(self._table.schema)
            self._table.validate(full=True)  # invalid offsets would read outside of a column
            self._features = parse_features(self._table.schema.metadata)
            self.features = media_types(self._features)
        except (pa.ArrowException, OSError, struct.error, IndexError) as error:
            raise UnreadableFile(f"could not be read as Arrow ({error})") from error

    def __reduce__(self) -> tuple:
        return ArrowRows, (self.path,)

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> JsonRow:
        number = range(len(self))[index]
        return _to_json_row(self._table.slice(number, 1), self._features, where=f"{self.path.name} row {number}")


def _object_span(path: Path) -> list[tuple[int, int]]:
    """Return a list with the byte range of a .json file that contains a single row.

    The first line of such a file is `{`. For any other file, the list is empty.
    """
    with path.open("rb") as file:
        is_one = path.suffix.casefold() == ".json" and file.readline(MAX_ROW_BYTES).strip() == b"{"
    return [(0, path.stat().st_size)] if is_one else []


def _line_spans(path: Path) -> Iterator[tuple[int, int]]:
    """Yield the half-open byte range (start, end) of each line that is not blank."""
    end = 0
    with path.open("rb") as file:
        while line := file.readline(MAX_ROW_BYTES + 1):
            if len(line) > MAX_ROW_BYTES:
                raise UnreadableFile(f"contains a row of more than {MAX_ROW_BYTES >> 20} MiB; write one row per line")
            start, end = end, end + len(line)
            mark = 3 if start == 0 and line.startswith(b"\xef\xbb\xbf") else 0
            if line[mark:].strip():
                yield start + mark, end


def _arrow_copy(path: Path) -> Path:
    """Return the path of a Parquet file's Arrow copy, and create the copy if it does not exist.

    If several processes need the copy, one creates it and the others wait. If the Parquet file has
    changed, a new copy is created.
    """
    folder = Path(tempfile.gettempdir()) / f"megatron_rl-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    require(folder.stat().st_uid == os.getuid(), "TMPDIR", folder, "is owned by another user; choose another temporary folder")
    size, written = file_fingerprint(path)
    key = hashlib.sha256(f"{path.resolve()} {size} {written} with metadata".encode()).hexdigest()[:32]
    copy = folder / f"{key}.arrow"
    with (folder / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not copy.exists():
            partial = copy.with_suffix(".partial")
            _copy_parquet(path, partial, lock=lock.fileno())
            partial.replace(copy)
    return copy


def _copy_parquet(path: Path, copy: Path, *, lock: int) -> None:
    """Copy a Parquet file in a child process under kernel resource limits.

    The child process inherits the lock. Therefore, no other process can write the same copy while
    the child process runs, even if this process is killed.

    Raises:
        UnreadableFile: the file cannot be read, or expands far beyond its size.
    """
    command = [sys.executable, "-P", parquet_copy.__file__, str(path), str(copy)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False, pass_fds=(lock,)
    )
    if done.returncode:
        copy.unlink(missing_ok=True)
        *_, said = done.stderr.splitlines() or [f"killed by signal {-done.returncode}: out of time or memory?"]
        most = f"{parquet_copy.COPY_BYTES >> 20} MiB plus {parquet_copy.COPY_FACTOR} times the file size"
        remedy = f"check the file, and the free space in that folder; the copy may take {most}"
        raise UnreadableFile(f"could not be read as Parquet and copied to {copy.parent} ({said}); {remedy}")


def _check_decompressed_size(messages: pa.ipc.MessageReader, size: int) -> None:
    """Raise UnreadableFile if an Arrow file's compressed buffers expand far beyond the file size.

    The message headers are parsed here, because pyarrow 26 does not report the compression. In a
    RecordBatch, the third field lists the buffers and the fourth field is the compression. A
    compressed buffer begins with its uncompressed length (arrow/format/Message.fbs).
    """
    total = 0
    for message in messages:
        header = message.metadata.to_pybytes()
        batch = _flatbuffer_offset(header, struct.unpack_from("<I", header)[0], 2) if message.type != "schema" else 0
        batch = _flatbuffer_offset(header, batch, 1) if message.type == "dictionary" else batch
        if not batch or not _flatbuffer_offset(header, batch, 3):
            continue
        buffers = _flatbuffer_offset(header, batch, 2)
        for number in range(struct.unpack_from("<I", header, buffers)[0] if buffers else 0):
            start, length = struct.unpack_from("<qq", header, buffers + 4 + 16 * number)
            total += max(struct.unpack_from("<q", message.body, start)[0], 0) if length >= 8 else 0
    if total > parquet_copy.COPY_BYTES + parquet_copy.MEMORY_FACTOR * size:
        raise UnreadableFile(f"its compressed buffers expand to {total} bytes; write it without compression, as datasets does")


def _flatbuffer_offset(flat: bytes, table: int, field: int) -> int:
    """Return the offset of a field's table or vector in a FlatBuffer, or 0 if the field is absent.

    The layout is described in the section "Internals" of the FlatBuffers documentation.
    """
    entries = table - struct.unpack_from("<i", flat, table)[0]
    slot = 4 + 2 * field
    offset = struct.unpack_from("<H", flat, entries + slot)[0] if slot < struct.unpack_from("<H", flat, entries)[0] else 0
    return table + offset + struct.unpack_from("<I", flat, table + offset)[0] if offset else 0


def _to_json_row(found: pa.Table | pa.RecordBatch, features: Features, *, where: str) -> JsonRow:
    """Convert a one-row slice to JSON values.

    Class labels are replaced by their names. 16-bit and 32-bit floats become `WrittenNumber`
    objects.

    Raises:
        ValueError: a map contains a duplicate key.
    """
    try:
        (row,) = found.to_pylist(maps_as_pydicts="strict")  # maps become mappings, as in JSON
    except KeyError as error:
        raise ValueError(f"{where}: a map contains a key twice; keep one of the two ({error.args[0]})") from error
    row = {name: with_decimal_forms(value, found.schema.field(name).type) for name, value in row.items()}
    return drop_nulls({name: name_labels(value, features.get(name)) for name, value in row.items()})


def _check_column_names(schema: pa.Schema) -> None:
    name = repeated_name(schema)
    if name:
        raise UnreadableFile(f"has the column {name} twice; rename one of the two, or remove it")


class _RepeatedKey(ValueError):
    """Error for a JSON object that contains a duplicate key."""


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build the JSON object from its key-value pairs; raise _RepeatedKey if a key repeats."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise _RepeatedKey(f"{shorten(twice)}: the key occurs twice; keep one of the two")
    return found


def drop_nulls(value: Any) -> Any:
    """Remove the keys with null values, at any depth."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value
