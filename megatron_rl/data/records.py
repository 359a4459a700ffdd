"""Combines the rows of several files into one sequence, and validates the values in rows."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_rl.config import ColumnSettings, require
from megatron_rl.data.column_names import ANSWER_COLUMNS, MESSAGE_COLUMNS, QUESTION_COLUMNS, is_picture_column
from megatron_rl.data.dataset_files import allowed_image_folders, find_data_files
from megatron_rl.data.images import StoredImage, make_stored_image
from megatron_rl.data.rows import JsonRow, open_rows

IMAGE_PLACEHOLDER = "<image>"
"""Text that marks the position of an image."""
SPECIAL_TOKENS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|endoftext|>",
)
"""Special tokens of Qwen.

Data must not contain them, because they would be tokenized as part of the conversation's structure.
"""

REQUIRED_COLUMNS = ("question", "answer")
ALTERNATIVE_COLUMNS = {
    "question": (*QUESTION_COLUMNS, *MESSAGE_COLUMNS),
    "answer": ("reward_model", *ANSWER_COLUMNS),
    "images": ("mm_hint",),
}
"""Maps a configurable column to the columns that are read if it is not configured.

For `images`, all image columns are alternatives too.
"""


@dataclass(slots=True, frozen=True)
class DataRecord:
    """A row with its origin and methods that validate its values."""

    row: JsonRow
    where: str
    """File and row, such as `train.parquet row 17`."""
    path: Path
    """Path of the file."""
    folder: Path
    """Base folder of relative image paths."""
    roots: tuple[Path, ...] = ()
    """Additional folders that may contain the row's images."""
    features: Mapping[str, str] = field(default_factory=dict)
    """Maps columns to media types (Image, Video or Audio) that `datasets` stored in the schema."""
    columns: tuple[str, ...] = ()
    """Names of the row's columns as written in the file."""
    benchmark_info: Mapping[str, object] = field(default_factory=dict)
    """Scoring information for an item of a published benchmark (data/benchmarks/items.py).

    It is set by the benchmark's reader; a row cannot provide it.
    """

    def require_text(self, value: object, name: str) -> str:
        """Return the value unchanged if it is text that a tokenizer accepts.

        Raises:
            ValueError: the value is not text or not valid Unicode, or it contains a NUL character
                or a special token.
        """
        if not isinstance(value, str):
            raise self.make_error(name, f"must be text, not {type(value).__name__}")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.make_error(name, f"cannot be encoded as UTF-8 ({error.reason})") from error
        if "\0" in value:
            raise self.make_error(name, "contains a NUL character; if the file is in UTF-16, convert it to UTF-8")
        found = [token for token in SPECIAL_TOKENS if token in value]
        if found:
            raise self.make_error(
                name, f"contains {found[0]}; write {IMAGE_PLACEHOLDER} for an image; only the chat template may add other special tokens"
            )
        return value

    def require_mapping(self, value: object, name: str) -> Mapping[str, object]:
        """Return the value unchanged; raise ValueError if it is not a mapping."""
        if not isinstance(value, Mapping):
            raise self.make_error(name, f"must be a mapping, not {type(value).__name__}")
        return value

    def require_list(self, value: object, name: str) -> list:
        """Return the value unchanged; raise ValueError if it is not a list."""
        if not isinstance(value, list):
            raise self.make_error(name, f"must be a list, not {type(value).__name__}")
        return value

    def load_image(self, value: object, name: str) -> StoredImage:
        """Return the image given by a value in this row."""
        return make_stored_image(value, folder=self.folder, where=f"{self.where}: {name}", roots=self.roots)

    def make_error(self, name: str, what: str) -> ValueError:
        """Return a ValueError that names the file, row and field."""
        return ValueError(f"{self.where}: {name}: {what}")


ConvertRecord = Callable[[DataRecord], DataRecord]
"""Function that converts a row of a benchmark's file to a row that questions.py can read.

For a row in an unexpected format, the function raises the ValueError that `record.make_error`
creates.
"""


class RecordFiles(Sequence[DataRecord]):
    """Rows of several files as one sequence, in the order of the files.

    Args:
        paths: names of files, folders or data sets (dataset_files.py).
        images_root: base folder of relative image paths; "" selects the folder of each file.
        image_roots: additional folders that may contain images.
        key: name of the setting, used in error messages.
        columns: names of the columns in the files.
        convert_record: function that converts each row to a row that questions.py can read.

    Raises:
        ValueError: no files are given, a file does not exist or has an invalid format, or there are
            no rows. The message names the setting `key`.
    """

    def __init__(
        self, paths: Sequence[str], *, images_root: str, image_roots: Sequence[str] = (), key: str = "task.data",
        columns: ColumnSettings | None = None, convert_record: ConvertRecord | None = None,
    ) -> None:  # fmt: skip
        found = [(name, path) for name in paths for path in find_data_files(name, key=key)]
        _check_no_repeated_files(found, key=key)
        labels = _file_labels([path for _, path in found])
        self._files = [(path, label, open_rows(path, key=key)) for (_, path), label in zip(found, labels, strict=True)]
        self._folder, self._convert_record = images_root, convert_record
        self.column_mapping = configured_columns(columns) if columns else {}
        """Maps the trainer's column names to the names given in task.data.columns."""
        self.ignored_columns = columns.ignored if columns else ()
        """Columns that never cause a warning."""
        self._roots = (*map(Path, image_roots), *(home for name in paths for home in allowed_image_folders(name, key=key)))
        require(len(self) > 0, key, list(paths), "has no rows")

    def __len__(self) -> int:
        return sum(len(rows) for _, _, rows in self._files)

    def locate(self, index: int) -> str:
        """Return the location of a row, such as `train.jsonl row 17`, without reading the row."""
        within = range(len(self))[index]
        for _, label, rows in self._files:
            if within < len(rows):
                return f"{label} row {within}"
            within -= len(rows)
        raise AssertionError(f"row {index} of {len(self)} is out of range")

    def __getitem__(self, index: int) -> DataRecord:
        within = range(len(self))[index]
        for path, label, rows in self._files:
            if within < len(rows):
                folder, row = Path(self._folder) if self._folder else path.parent, rows[within]
                record = DataRecord(row, f"{label} row {within}", path, folder, (path.parent, *self._roots), rows.features, tuple(row))
                record = rename_columns(record, self.column_mapping)
                return record if self._convert_record is None else self._convert_record(record)
            within -= len(rows)
        raise AssertionError(f"row {index} of {len(self)} is out of range")


def _check_no_repeated_files(found: Sequence[tuple[str, Path]], *, key: str) -> None:
    """Raise ValueError if two names resolve to the same file.

    This check prevents the rows of a file from being used twice.
    """
    names: dict[str, str] = {}
    for name, path in found:
        other = names.setdefault(os.path.realpath(path), name)
        require(other == name, key, name, f"{path} is already given as {other}; remove one of the two names")


def _file_labels(paths: Sequence[Path]) -> list[str]:
    """Return the file names used in messages.

    If several files have the same name, their folders are included.
    """
    names = Counter(path.name for path in paths)
    common = os.path.commonpath([path.parent.absolute() for path in paths]) if paths else ""
    return [path.name if names[path.name] < 2 else os.path.relpath(path.absolute(), common) for path in paths]


def configured_columns(columns: ColumnSettings) -> dict[str, str]:
    """Map the trainer's name of each configured column to the column's name in the files."""
    names = {
        "question": columns.question, "answer": columns.answer, "images": columns.images,
        "id": columns.id, "data_source": columns.data_source,
    }  # fmt: skip
    return {ours: theirs for ours, theirs in names.items() if theirs}


def rename_columns(record: DataRecord, columns: Mapping[str, str]) -> DataRecord:
    """Rename a record's configured columns to the trainer's column names.

    Other columns from which the loader could read the same values are removed.
    """
    if not columns:
        return record
    row = dict(record.row)
    chosen = {ours: row[theirs] for ours, theirs in columns.items() if theirs in row}
    lacking = [theirs for ours, theirs in columns.items() if ours in REQUIRED_COLUMNS and theirs not in row]
    if lacking:
        raise record.make_error(lacking[0], f"is missing, but task.data.columns names it; the row has the columns {', '.join(row)}")
    instead = {*columns, *columns.values(), *(name for ours in columns for name in ALTERNATIVE_COLUMNS.get(ours, ()))}
    kept = {name: value for name, value in row.items() if name not in instead and not ("images" in columns and is_picture_column(name))}
    if isinstance(kept.get("extra_info"), Mapping):
        kept["extra_info"] = {name: value for name, value in kept["extra_info"].items() if name not in columns}
    return replace(record, row=kept | chosen)
