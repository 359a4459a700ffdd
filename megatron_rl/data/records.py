"""Rows of several files as one sequence, and the checks that name file, row and field."""

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
"""Where a text shows a picture."""
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
"""Qwen's own tokens: in the words of a transcript's assistant they would be read as the conversation's."""

REQUIRED_COLUMNS = ("question", "answer")
ALTERNATIVE_COLUMNS = {
    "question": (*QUESTION_COLUMNS, *MESSAGE_COLUMNS),
    "answer": ("reward_model", *ANSWER_COLUMNS),
    "images": ("mm_hint",),
}
"""Column -> others that would be read for the same; `images`: all columns of pictures too."""


@dataclass(slots=True, frozen=True)
class DataRecord:
    row: JsonRow
    where: str
    """`train.parquet row 17`."""
    path: Path
    """The file."""
    folder: Path
    """Where relative paths of pictures start."""
    roots: tuple[Path, ...] = ()
    """Folders below which a row may name pictures, beside that one."""
    features: Mapping[str, str] = field(default_factory=dict)
    """Types of `datasets` of the file's columns, where its schema has them: Image, Video, Audio."""
    columns: tuple[str, ...] = ()
    """Names of the row's columns as they are in the file."""
    benchmark_info: Mapping[str, object] = field(default_factory=dict)
    """What a published benchmark scores a reply by (data/benchmarks/items.py). Never a row's own word."""

    def require_text(self, value: object, name: str) -> str:
        """The value, which must be text that a tokenizer takes."""
        if not isinstance(value, str):
            raise self.make_error(name, f"must be text, is {type(value).__name__}")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.make_error(name, f"is not Unicode ({error.reason})") from error
        if "\0" in value:
            raise self.make_error(name, "holds a NUL character; is the file in UTF-16? write it in UTF-8")
        found = [token for token in SPECIAL_TOKENS if token in value]
        if found:
            raise self.make_error(
                name, f"holds {found[0]}; a picture's place is written {IMAGE_PLACEHOLDER}, other tokens are the chat template's to write"
            )
        return value

    def require_mapping(self, value: object, name: str) -> Mapping[str, object]:
        if not isinstance(value, Mapping):
            raise self.make_error(name, f"must be a mapping, is {type(value).__name__}")
        return value

    def require_list(self, value: object, name: str) -> list:
        if not isinstance(value, list):
            raise self.make_error(name, f"must be a list, is {type(value).__name__}")
        return value

    def load_image(self, value: object, name: str) -> StoredImage:
        return make_stored_image(value, folder=self.folder, where=f"{self.where}: {name}", roots=self.roots)

    def make_error(self, name: str, what: str) -> ValueError:
        return ValueError(f"{self.where}: {name}: {what}")


ConvertRecord = Callable[[DataRecord], DataRecord]
"""A row as a benchmark has it -> a row as questions.py reads it. ValueError, by record.error: it is none of those."""


class RecordFiles(Sequence[DataRecord]):
    """The rows of all files (dataset_files.py: what names stand for), one file after the other; `columns`: how they are called in them;
    `read`: what makes a row that questions.py knows of one.

    Raises ValueError, under the setting `key`: no file, one that is not there or not of its format, no rows.
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
        """Our names -> those of the files, where task.data.columns names them."""
        self.ignored_columns = columns.ignored if columns else ()
        """Columns that no warning names."""
        self._roots = (*map(Path, image_roots), *(home for name in paths for home in allowed_image_folders(name, key=key)))
        require(len(self) > 0, key, list(paths), "has no rows")

    def __len__(self) -> int:
        return sum(len(rows) for _, _, rows in self._files)

    def locate(self, index: int) -> str:
        """Return file and row without reading it: `train.jsonl row 17`."""
        within = range(len(self))[index]
        for _, label, rows in self._files:
            if within < len(rows):
                return f"{label} row {within}"
            within -= len(rows)
        raise AssertionError(f"row {index} of {len(self)} lies in no file")

    def __getitem__(self, index: int) -> DataRecord:
        within = range(len(self))[index]
        for path, label, rows in self._files:
            if within < len(rows):
                folder, row = Path(self._folder) if self._folder else path.parent, rows[within]
                record = DataRecord(row, f"{label} row {within}", path, folder, (path.parent, *self._roots), rows.features, tuple(row))
                record = rename_columns(record, self.column_mapping)
                return record if self._convert_record is None else self._convert_record(record)
            within -= len(rows)
        raise AssertionError(f"row {index} of {len(self)} lies in no file")


def _check_no_repeated_files(found: Sequence[tuple[str, Path]], *, key: str) -> None:
    """Raise ValueError where two names stand for the same file: its rows would count twice."""
    names: dict[str, str] = {}
    for name, path in found:
        other = names.setdefault(os.path.realpath(path), name)
        require(other == name, key, name, f"{path} is read by the name {other} already; give one of the two")


def _file_labels(paths: Sequence[Path]) -> list[str]:
    """Return the names of files in messages: with as many of their folders as tell them apart."""
    names = Counter(path.name for path in paths)
    common = os.path.commonpath([path.parent.absolute() for path in paths]) if paths else ""
    return [path.name if names[path.name] < 2 else os.path.relpath(path.absolute(), common) for path in paths]


def configured_columns(columns: ColumnSettings) -> dict[str, str]:
    """Our names -> those of the files, where they are chosen."""
    names = {
        "question": columns.question, "answer": columns.answer, "images": columns.images,
        "id": columns.id, "data_source": columns.data_source,
    }  # fmt: skip
    return {ours: theirs for ours, theirs in names.items() if theirs}


def rename_columns(record: DataRecord, columns: Mapping[str, str]) -> DataRecord:
    """The record with our names for the columns that are chosen, and without those that might be read instead."""
    if not columns:
        return record
    row = dict(record.row)
    chosen = {ours: row[theirs] for ours, theirs in columns.items() if theirs in row}
    lacking = [theirs for ours, theirs in columns.items() if ours in REQUIRED_COLUMNS and theirs not in row]
    if lacking:
        raise record.make_error(lacking[0], f"is missing, and task.data.columns names it; the row has {', '.join(row)}")
    instead = {*columns, *columns.values(), *(name for ours in columns for name in ALTERNATIVE_COLUMNS.get(ours, ()))}
    kept = {name: value for name, value in row.items() if name not in instead and not ("images" in columns and is_picture_column(name))}
    if isinstance(kept.get("extra_info"), Mapping):
        kept["extra_info"] = {name: value for name, value in kept["extra_info"].items() if name not in columns}
    return replace(record, row=kept | chosen)
