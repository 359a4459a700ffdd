"""Finds the columns of pictures in a row, and writes the errors for columns that are missing."""

import ast
import json
import os
from collections.abc import Iterable

from megatron_rl.data.column_names import IMAGE_COLUMNS, LIKELY, NAME_COLUMNS, NUMBERED, PICTURE_SUFFIXES
from megatron_rl.data.records import Record

_IMAGEFOLDER = "metadata"
"""Stem of the file in which Hugging Face's imagefolder names its pictures."""


class MissingColumn(ValueError):
    """A row has no value for `name` ("question" or "answer"). The columns let a survey write one line for a whole file."""

    def __init__(self, record: Record, name: str, *, hint: str = "") -> None:
        self.where, self.name, self.columns, self.hint = record.where, name, record.columns or tuple(record.row), hint
        super().__init__(f"{record.where}: {name}: is missing. {missing_remedy(name, self.columns, hint)}")


def missing_remedy(name: str, columns: Iterable[str], hint: str = "") -> str:
    """Return the columns that are there, and the setting that reads one of them as `name`.

    Example: `Columns: filename, label. Name yours: 'task.data.columns={answer: label}'`.
    """
    columns = list(columns)
    by_name = {column.casefold(): column for column in columns}
    found = next((by_name[likely] for likely in (name, *LIKELY[name]) if likely in by_name), "COLUMN")
    listed = ", ".join(columns[:30]) or "none"
    return f"Columns: {listed}. Name yours: 'task.data.columns={{{name}: {found}}}'{hint and f' ({hint})'}"


def picture_columns(record: Record) -> list[str]:
    """Return the columns whose pictures belong to the question, numbered ones in numeric order.

    Raises:
        ValueError: two columns name the pictures.
    """
    filled = [name for name, value in record.row.items() if value not in ("", [], {})]
    groups: dict[str, list[tuple[int, str]]] = {}
    for name in filled:
        if name.casefold() in IMAGE_COLUMNS:
            groups.setdefault(name, []).append((0, name))
        elif numbered := NUMBERED.fullmatch(name.casefold()):
            groups.setdefault(f"{numbered[1]}{numbered[2]}_N", []).append((int(numbered[3]), name))
    if len(groups) > 1:
        columns = [name for group in groups.values() for _, name in sorted(group)]
        keep = f"keep one of these columns, or choose it: 'task.data.columns={{images: {columns[0]}}}'"
        raise record.error(" and ".join(columns), f"name the pictures twice; {keep}")
    if groups:
        ((*group,),) = groups.values()
        return [name for _, name in sorted(group)]
    return [name for name in filled if name.casefold() in NAME_COLUMNS and _names_pictures(record, record.row[name])][:1]


def _names_pictures(record: Record, value: object) -> bool:
    """Return True if a column of file names holds a picture: one that exists, or any in imagefolder's metadata."""
    values = value if isinstance(value, list) else [value]
    is_listed = record.path.stem.casefold() == _IMAGEFOLDER
    return all(
        isinstance(each, str) and each.casefold().endswith(PICTURE_SUFFIXES) and (is_listed or os.path.isfile(record.folder / each))
        for each in values
    )


def literal(text: str) -> object:
    """Return what a text holds in JSON's or Python's notation, None where it is neither."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


def listed_values(value: object) -> object:
    """Return the list that a text is where it is one of texts in JSON's or Python's notation, as tables have it; else the value itself."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    found = literal(value)
    return found if isinstance(found, list) and all(isinstance(item, str) for item in found) else value
