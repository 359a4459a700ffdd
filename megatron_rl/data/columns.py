"""Finds the image columns of a row and formats the errors for missing columns."""

import os
from collections.abc import Iterable, Mapping

from megatron_rl.data.column_names import FILE_NAME_COLUMNS, IMAGE_COLUMNS, LIKELY_NAMES, NUMBERED_IMAGE_COLUMN, PICTURE_SUFFIXES
from megatron_rl.data.literals import parse_text_list
from megatron_rl.data.media import find_media
from megatron_rl.data.records import DataRecord

_IMAGEFOLDER = "metadata"
"""Stem of the metadata file in which Hugging Face's imagefolder lists its images."""


class MissingColumn(ValueError):
    """Error for a row without a question or an answer; `name` is "question" or "answer".

    `columns` contains the names of the row's columns.
    """

    def __init__(self, record: DataRecord, name: str, *, hint: str = "") -> None:
        self.where, self.name, self.columns = record.where, name, record.columns or tuple(record.row)
        self.hint = hint or _hint_of_rows(record)
        super().__init__(f"{record.where}: {name}: is missing. {missing_remedy(name, self.columns, self.hint)}")


def _hint_of_rows(record: DataRecord) -> str:
    """Return a hint if the file is a single JSON object that contains the rows in a nested list.

    COCO and VQA v2 are published in this form. The result is "" for all other files.
    """
    lists = [name for name, value in record.row.items() if isinstance(value, list) and value and isinstance(value[0], Mapping)]
    rows = [name for name in lists if not {"role", "from", "type"} & record.row[name][0].keys()]
    is_one = record.path.suffix.casefold() == ".json" and record.where.endswith(" row 0")
    remedy = f"the rows may be in {' or '.join(rows)}: write that list, joined with its answers, to a separate file"
    return remedy if is_one and rows else ""


def missing_remedy(name: str, columns: Iterable[str], hint: str = "") -> str:
    """Return a message that lists the existing columns and suggests a value of task.data.columns.

    For a missing answer, the suggestion may be `task.data.columns={answer: label}`.
    """
    columns = list(columns)
    by_name = {column.casefold(): column for column in columns}
    found = next((by_name[likely] for likely in (name, *LIKELY_NAMES[name]) if likely in by_name), "COLUMN")
    listed = ", ".join(columns[:30]) or "none"
    return f"Columns: {listed}. Choose one: 'task.data.columns={{{name}: {found}}}'{hint and f' ({hint})'}"


def picture_columns(record: DataRecord) -> list[str]:
    """Return the names of the columns that contain the question's images.

    Numbered columns are in numeric order.

    Raises:
        ValueError: two columns, or two series of numbered columns, provide images.
    """
    filled = [name for name, value in record.row.items() if value not in ("", [], {})]
    groups: dict[str, list[tuple[int, str]]] = {}
    for name in filled:
        if name.casefold() in IMAGE_COLUMNS:
            groups.setdefault(name, []).append((0, name))
        elif numbered := NUMBERED_IMAGE_COLUMN.fullmatch(name.casefold()):
            groups.setdefault(f"{numbered[1]}{numbered[2]}_N", []).append((int(numbered[3]), name))
    if len(groups) > 1:
        there = {key: group for key, group in groups.items() if existing_columns(record, [name for _, name in group])}
        groups = there if len(there) == 1 else groups
    if len(groups) > 1:
        columns = [name for group in groups.values() for _, name in sorted(group)]
        keep = f"keep one of these columns, or choose one: 'task.data.columns={{images: {columns[0]}}}'"
        raise record.make_error(" and ".join(columns), f"each contain images; {keep}")
    if groups:
        ((*group,),) = groups.values()
        return [name for _, name in sorted(group)]
    return [name for name in filled if name.casefold() in FILE_NAME_COLUMNS and _names_pictures(record, record.row[name])][:1]


def unread_picture_keys(record: DataRecord, columns: Iterable[str]) -> dict[str, object]:
    """Return the values in image mappings under keys other than `bytes` and `path`.

    The loader does not read these values. The result is keyed by names such as `image.bbox`.
    """
    values = {name: parse_text_list(record.row[name]) for name in columns}
    pictures = [(name, item) for name, value in values.items() for item in (value if isinstance(value, list) else [value])]
    return {
        f"{name}.{key}": held
        for name, item in pictures
        if isinstance(item, Mapping)
        for key, held in item.items()
        if key not in ("bytes", "path")
    }


def existing_columns(record: DataRecord, columns: Iterable[str]) -> list[str]:
    """Remove the columns that contain only a web address or the name of a missing file.

    Such a column only states the origin of an image that is stored in another column.
    """
    return [name for name in columns if not _is_absent(record, name)]


def _is_absent(record: DataRecord, name: str) -> bool:
    media = find_media(record.row[name], record, name) if isinstance(record.row[name], str) else None
    return media is not None and not media.exists


def _names_pictures(record: DataRecord, value: object) -> bool:
    """Return True if all values in a file-name column are names of image files.

    The image files must exist, unless the row comes from imagefolder's metadata file.
    """
    values = value if isinstance(value, list) else [value]
    is_listed = record.path.stem.casefold() == _IMAGEFOLDER
    return all(
        isinstance(each, str) and each.casefold().endswith(PICTURE_SUFFIXES) and (is_listed or os.path.isfile(record.folder / each))
        for each in values
    )
