"""Tests rows of CSV and TSV files. Oracle: csv and pandas reading the whole file."""

import csv
import io
import pickle
import tempfile
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data.rows import open_rows
from megatron_rl.data.tables import TableRows, UnreadableFile

FIELD = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


@settings(deadline=None)
@given(st.lists(st.lists(FIELD, min_size=3, max_size=3), max_size=8), st.sampled_from([".tsv", ".csv"]), st.booleans())
def test_every_table_is_read_as_it_was_written(rows: list[list[str]], suffix: str, marked: bool) -> None:
    """Fields may contain quotation marks, tabs and line ends, and the file may have a byte order
    mark. Empty fields are absent from the row.
    """
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t" if suffix == ".tsv" else ",")
    writer.writerows([["a", "b b", "\u00fc"], *rows])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"table{suffix}"
        path.write_bytes(("\ufeff" * marked + text.getvalue()).encode())
        read = open_rows(path)
        wanted = [{name: value for name, value in zip(("a", "b b", "\u00fc"), row, strict=True) if value} for row in rows]
        assert list(pickle.loads(pickle.dumps(read))) == wanted and len(read) == len(rows)


def test_a_picture_is_written_once(tmp_path: Path) -> None:
    """An image that is stored in one row can be referenced from earlier and later rows by the index
    of that row. Other values stay unchanged.
    """
    rows = [{"index": 3, "image": "5"}, {"index": 5, "image": "x" * 65}, {"index": 6, "image": "5"}, {"index": 7, "image": "a.png"}]
    pd.DataFrame(rows).to_csv(tmp_path / "t.tsv", sep="\t", index=False)
    assert [row["image"] for row in open_rows(tmp_path / "t.tsv")] == ["x" * 65] * 3 + ["a.png"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "its first row must contain each column name once; it contains none"),
        (b"a\ta\n1\t2\n", "its first row must contain each column name once; it contains a, a"),
        (b"a\tb\n1\t2\t3\n", "row 0 has 3 fields, but the first row names 2 columns"),
        (b'a\tb\n1\t"2\n3\t4\n', "the row that begins at byte 4 is invalid"),
        (b"a\tb\n\xff\t2\n", "the row that begins at byte 4 is invalid"),
    ],
)
def test_what_is_no_table_is_one_line(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_bytes(content)
    with pytest.raises(ValueError, match=f"^task.data.eval={tmp_path}/t.tsv: {said}"):
        open_rows(tmp_path / "t.tsv", key="task.data.eval")


def test_a_row_without_an_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_bytes(b'a\tb\n1\t"' + b"x\n" * 40)
    with pytest.raises(UnreadableFile, match="contains a row of more than 0 MiB; check for an unclosed quotation mark"):
        TableRows(tmp_path / "t.tsv", max_row_bytes=64)


def test_a_file_that_changes_under_a_run_is_no_other_question(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("a\tb\n1\t2\n3\t4\n")
    read = open_rows(tmp_path / "t.tsv")
    assert read[-1] == {"a": "3", "b": "4"}
    (tmp_path / "t.tsv").write_text("a\tb\n3\t4\n1\t2 \n")
    with pytest.raises(ValueError, match="^t.tsv row 0: the file has changed since the run began"):
        read[0]


def test_a_json_file_may_be_one_object(tmp_path: Path) -> None:
    """An object on several lines is one row. An object on a single line is a JSON line."""
    (tmp_path / "one.json").write_text('{\n "a": 1,\n "b": [2]\n}\n')
    (tmp_path / "line.json").write_text('{"a": 1}\n{"a": 2}\n')
    assert list(open_rows(tmp_path / "one.json")) == [{"a": 1, "b": [2]}] and list(open_rows(tmp_path / "line.json")) == [
        {"a": 1},
        {"a": 2},
    ]
