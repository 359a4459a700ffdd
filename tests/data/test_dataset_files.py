"""Tests which files of a folder are read, and which formats are refused. Oracles: the `datasets`
library, and files written by other libraries.
"""

import bz2
import gzip
import json
import lzma
import pickle
import re
import sqlite3
import tempfile
import zipfile
from pathlib import Path

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl.data.dataset_files import find_data_files
from megatron_rl.data.questions import load_questions
from megatron_rl.data.rows import open_rows
from tests.support.data_files import make_png, write_rows

ROWS = [{"question": f"q{number}", "answer": str(number)} for number in range(6)]
datasets.disable_progress_bars()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write Arrow copies to a folder of the test."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cache"))


def write_arrow(path: Path, table: pa.Table) -> None:
    """Write the table as Parquet or in Arrow's file format."""
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def answers(*names: object) -> list[str]:
    return [example.payload["answer"] for example in load_questions([str(name) for name in names], images_root="", name="train")]


def fails(name: object, said: str) -> None:
    with pytest.raises(ValueError, match=f"^task.data.train={re.escape(str(name))}: {said}"):
        answers(name)


@pytest.mark.known_failure("stale-shards")
def test_a_folder_that_was_saved_twice_is_read_as_datasets_does(tmp_path: Path) -> None:
    """Only the shards of the second save are read; the shards of the first save are in the same
    folder.
    """
    table, saved = datasets.Dataset.from_list(ROWS), tmp_path / "saved"
    table.save_to_disk(saved, num_shards=3)
    table.select(range(2)).save_to_disk(saved, num_shards=1)
    assert len(list(saved.glob("*.arrow"))) == 4
    assert answers(saved) == [str(answer) for answer in datasets.load_from_disk(saved)["answer"]] == ["0", "1"]
    (saved / "data-00000-of-00001.arrow").unlink()
    fails(
        saved, f"{saved}/state.json lists files that do not exist: data-00000-of-00001.arrow; copy the files, or save the data set again$"
    )


def test_a_saved_dict_of_splits_is_read_as_datasets_does(tmp_path: Path) -> None:
    """A split of an earlier save in the same folder is not read, and splits may have any name."""
    saved = tmp_path / "saved"
    table = datasets.Dataset.from_list(ROWS)
    (table.select(range(3))).save_to_disk(saved / "old")
    datasets.DatasetDict({"train_sft": table.select([1, 2]), "easy": table.select([3])}).save_to_disk(saved)
    assert answers(f"{saved}:train_sft") == ["1", "2"] and answers(f"{saved}:easy") == ["3"]
    assert sorted(datasets.load_from_disk(saved)) == ["easy", "train_sft"]
    fails(saved, f"contains the splits train_sft, easy; choose one of them, {saved}:train_sft$")
    fails(f"{saved}:old", "contains no files of the split old$")
    (saved / "easy").rename(saved / "hard")
    fails(f"{saved}:easy", f"dataset_dict.json lists the split easy, but there is no folder {saved}/easy; save the data set again$")


@pytest.mark.known_failure("stale-shards")
@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["train-00000-of-00002"], "lacks train-00001-of-00002.jsonl; add these files, or name the files to read$"),
        (["train-00001-of-00009"], "lacks train-00000-of-00009.jsonl, train-0.* and 3 more; add"),
        (
            ["train-00000-of-00002", "train-00001-of-00002", "train-00000-of-00001"],
            "contains shards of several sets named train: 1 of 1,",
        ),
        (["a-00000-of-00001-0123456789abcdef", "a-00000-of-00001-fedcba9876543210"], "contains a-00000-of-00001 more than once; "),
        (["train-00000-of-00002", "train-00001-of-00002"], ""),
        (["train-00001-of-00002", "train-00002-of-00002"], ""),  # numbered from 1
        (["a-00000-of-00001", "b-00000-of-00002", "b-00001-of-00002"], ""),
        (["a-00000-of-00002-0123456789abcdef", "a-00001-of-00002-fedcba9876543210"], ""),
        (["part-7", "part-9"], ""),
        (["d_00000_of_00002"], "lacks d_00001_of_00002.jsonl; add these"),
        (["d-1-of-3", "d-2-of-3"], "lacks d-0-of-3.jsonl; add these"),
        (["d.00001-of-00002"], "lacks d.00000-of-00002.jsonl; add these"),
        (["00000-of-00002"], "lacks 00001-of-00002.jsonl; add these"),
        (["d-1-of-2", "d-2-of-2"], ""),
    ],
)
def test_shards_are_all_there_and_of_one_set(names: list[str], said: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for number, name in enumerate(names):
        write_rows(folder / f"{name}.jsonl", ROWS[number : number + 1])
    if said:
        fails(folder, f"{folder} {said}")
        assert answers(folder / f"{names[0]}.jsonl") == ["0"], "what is named itself is read"
    else:
        assert len(answers(folder)) == len(names)


def test_files_of_one_kind_are_read_together(tmp_path: Path) -> None:
    """JSON lines with either suffix are read together, and so are CSV and TSV. Files of a format
    with lower precedence are treated as descriptions of the data.
    """
    rows = [json.dumps(row) + "\n" for row in ROWS]
    texts = {
        "lines": {"a.jsonl": rows[0], "b.ndjson": rows[1], "c.json": "[]"},
        "tables": {"a.csv": "question,answer\nq,0\n", "b.tsv": "question\tanswer\nq\t1\n", "c.txt": ""},
    }
    for folder, files in texts.items():
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text)
        assert answers(tmp_path / folder) == ["0", "1"]


def test_an_old_view_that_was_saved_is_refused(tmp_path: Path) -> None:
    """Before version 1.9, datasets saved all rows, and the indices of the selected rows in a
    separate file.
    """
    folder = tmp_path / "saved"
    folder.mkdir()
    write_arrow(folder / "dataset.arrow", pa.Table.from_pylist(ROWS))
    state = {"_data_files": [{"filename": "dataset.arrow"}], "_indices_data_files": [{"filename": "indices.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))
    fails(folder, f"{folder}/state.json lists indices of an older version of .*; call flatten_indices")
    (folder / "state.json").write_text(json.dumps(state | {"_indices_data_files": None}))
    assert answers(folder) == [row["answer"] for row in ROWS]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_column_that_a_file_has_twice_is_refused(suffix: str, tmp_path: Path) -> None:
    struct = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"])
    for columns, name in (({"question": ["?"], "answer": ["1"]}, "image"), ({"question": ["?"], "s": struct}, "a")):
        names, arrays = [*columns, *["image"] * 2][: 4 if name == "image" else 2], [*map(pa.array, columns.values())]
        table = pa.Table.from_arrays([*arrays, *[pa.array(["x"])] * (len(names) - 2)], names=names)
        path = tmp_path / f"{name}{suffix}"
        write_arrow(path, table)
        fails(path, f"has the column {name} twice; rename one of the two, or remove it$")


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_key_that_a_map_has_twice_is_refused(suffix: str, tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.string())
    table = pa.table({"question": ["?"] * 2, "reward_model": pa.array([[("ground_truth", "1")], [("ground_truth", "1")] * 2], kind)})
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    assert open_rows(path)[0]["reward_model"] == {"ground_truth": "1"}
    with pytest.raises(ValueError, match=rf"^a{suffix} row 1: a map contains a key twice; keep one of the two .*ground_truth"):
        answers(path)


def test_a_key_that_a_row_has_twice_is_refused(tmp_path: Path) -> None:
    for text in ('{"question": "?", "answer": "1", "answer": "2"}', '{"question": "?", "extra_info": {"answer": 1, "answer": 2}}'):
        (tmp_path / "a.jsonl").write_text(text)
        with pytest.raises(ValueError, match="^a.jsonl row 0: answer: the key occurs twice; keep one of the two$"):
            answers(tmp_path / "a.jsonl")


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_map_is_a_mapping(suffix: str, tmp_path: Path) -> None:
    """A column of Arrow's map type, as written by Spark and DuckDB, is read as a mapping."""
    kind = pa.map_(pa.string(), pa.string())
    table = pa.table({"question": ["?"], "reward_model": pa.array([[("ground_truth", "7")]], kind), "x": pa.array([[("a", "b")]], kind)})
    path = tmp_path / f"a{suffix}"
    write_arrow(path, table)
    assert answers(path) == ["7"]
    assert open_rows(path)[0]["x"] == {"a": "b"}


def test_a_file_is_not_read_by_two_names(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(
        ValueError, match=rf"^task.data.train={tmp_path}: .*a.jsonl is already given as {path}; remove one of the two names$"
    ):
        answers(path, tmp_path)


@pytest.mark.parametrize("suffix", [".PARQUET", ".JSONL", ".Json", ".CSV", ".TSV", ".Arrow", ".ndjson"])
def test_suffixes_in_capitals(suffix: str, tmp_path: Path) -> None:
    small = suffix.casefold()
    path = tmp_path / f"data{small}"
    if small in (".csv", ".tsv"):
        path.write_text("question,answer\nq0,0\n".replace(",", {".csv": ",", ".tsv": "\t"}[small]))
    elif small == ".arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, pa.Table.from_pylist(ROWS[:1]).schema) as writer:
            writer.write_table(pa.Table.from_pylist(ROWS[:1]))
    else:
        write_rows(path, ROWS[:1])
    path = path.rename(tmp_path / f"data{suffix}")
    assert answers(path) == answers(tmp_path) == ["0"]


def packed(path: Path) -> Path:
    """Write ROWS to a file in the format of its suffix."""
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
    opened = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    if path.suffix in opened:
        with opened[path.suffix](path, "wb") as file:
            file.write(lines)
    elif path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data.jsonl", lines)
    elif path.suffix == ".db":
        sqlite3.connect(path).execute("create table t (question)")
    elif path.suffix == ".pkl":
        path.write_bytes(pickle.dumps(ROWS))
    else:
        path.write_bytes(lines)
    return path


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a.jsonl.gz", "is compressed; unpack it: gunzip a.jsonl.gz$"), ("a.jsonl.bz2", "is compressed; unpack it: bunzip2"),
        ("a.json.xz", "is compressed; unpack it: unxz"), ("a.csv.zst", "is compressed; unpack it: unzstd a.csv.zst"),
        ("a.zip", "is compressed; unpack it: unzip a.zip"), ("a.TAR", "is compressed; unpack it: tar -xf a.TAR"),
        ("a.pkl", "is a pickle, which could run code; write it as Parquet or JSON lines$"), ("a.xlsx", "is a spreadsheet; save it as CSV"),
        ("a.db", "is a SQLite database; export it as CSV"),
        ("a.txt", r"is not in a supported format \(.txt\); Parquet .*convert or rename it$"),
        ("a", r"is not in a supported format \(no suffix\); Parquet"), ("a.yaml", r"is not in a supported format \(.yaml\); Parquet "),
    ],
)  # fmt: skip
def test_formats_that_are_not_read_are_named(name: str, said: str, tmp_path: Path) -> None:
    fails(packed(tmp_path / name), said)


@pytest.mark.parametrize(
    ("made", "name", "said"),
    [
        ("a.gz", "a.jsonl", r"is compressed \(gzip\) despite its name; unpack it: gunzip$"),
        ("a.bz2", "a.csv", r"is compressed \(bzip2\)"), ("a.xz", "a.json", r"is compressed \(xz\)"),
        ("a.zip", "a.csv", "is a zip archive or an Excel file"), ("a.db", "a.json", "is a SQLite database"),
        ("a.pkl", "a.jsonl", "is a pickle, which could run code"),
    ],
)  # fmt: skip
def test_content_that_is_not_what_the_suffix_says(made: str, name: str, said: str, tmp_path: Path) -> None:
    fails(packed(tmp_path / made).rename(tmp_path / name), said)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-16-le"])
def test_utf_16_is_named(encoding: str, tmp_path: Path) -> None:
    """UTF-16 is detected with and without a byte order mark."""
    (tmp_path / "a.csv").write_bytes("question,answer\nq,1\n".encode(encoding))
    fails(
        tmp_path / "a.csv", "is in UTF-16 despite" if encoding == "utf-16" else "its first row contains NUL bytes; if the file is in UTF-16"
    )


def test_a_folder_with_compressed_data_is_refused(tmp_path: Path) -> None:
    """Compressed data and incomplete downloads are refused. An archive of images next to the rows
    is not data, and neither is compressed data in another format.
    """
    folder = tmp_path / "data"
    folder.mkdir()
    write_rows(folder / "a.jsonl", ROWS)
    packed(folder / "images.zip"), packed(folder / "old.csv.gz")
    assert len(answers(folder)) == 6
    (folder / "c.jsonl.incomplete").write_text("")
    fails(folder, "c.jsonl.incomplete is an unfinished download; download it again, or remove it$")
    (folder / "c.jsonl.incomplete").unlink()
    packed(folder / "b.jsonl.gz")
    fails(folder, f"b.jsonl.gz is compressed, which is not read; unpack it: gunzip {folder}/b.jsonl.gz$")
    (folder / "a.jsonl").unlink(), (folder / "b.jsonl.gz").unlink(), (folder / "old.csv.gz").unlink()
    fails(folder, "contains no files that end in .parquet, .* it contains files that end in .zip$")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "question;answer\nq;1\n", "its first row is separated by ';'"),
        ("a.csv", "question\tanswer\nq\t1\n", "its first row is separated by "),
        ("a.tsv", "question,answer\nq,1\n", "its first row is separated by ','"),
        ("a.csv", " question ,question\nq,1\n", "its first row must contain each column name once"),
    ],
)
def test_tables_that_are_separated_by_something_else(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    fails(tmp_path / name, said)


def test_answers_of_a_table_stay_text(tmp_path: Path) -> None:
    """The answers of a table are not converted. Spaces around column names are removed. Oracle: the
    text itself.
    """
    given = ["007", "1e5", "NA", "nan", "None", "true", "1,000", "-0", "2024-01-02"]
    (tmp_path / "a.csv").write_text("question , answer\n" + "".join(f'q,"{text}"\n' for text in given))
    assert answers(tmp_path / "a.csv") == given


def test_a_table_that_pandas_wrote_with_its_index(tmp_path: Path) -> None:
    """The unnamed index column gets the same name as in pandas, which is the oracle. Other unnamed
    columns are refused.
    """
    frame = pd.DataFrame(ROWS)
    frame.to_csv(tmp_path / "a.csv")
    assert list(open_rows(tmp_path / "a.csv")) == pd.read_csv(tmp_path / "a.csv", dtype=str).to_dict("records")
    assert answers(tmp_path / "a.csv") == [row["answer"] for row in ROWS]
    (tmp_path / "b.csv").write_text("question,answer,\nq,1,\n")
    fails(tmp_path / "b.csv", "its first row must contain each column name once; it contains question, answer, $")
    (tmp_path / "c.csv").write_bytes("question,answer\n\u00e4,1\n".encode("latin-1"))
    fails(tmp_path / "c.csv", r"the row that begins at byte 16 is invalid \(.*\); write the file in UTF-8$")


def test_labels_are_read_by_their_names(tmp_path: Path) -> None:
    """Class labels are read as their names, also in lists and mappings. Oracle: the `datasets`
    library, which wrote the numbers.
    """
    names = datasets.ClassLabel(names=["cat", "dog"])
    other = {"all": datasets.Sequence(names), "s": {"kind": names, "n": datasets.Value("int8")}}
    features = datasets.Features({"question": datasets.Value("string"), "answer": names, **other})
    rows = [{"question": "?", "answer": each, "all": [0, each], "s": {"kind": each, "n": 1}} for each in (1, 0)]
    table = datasets.Dataset.from_list(rows, features=features)
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    for name in (tmp_path / "a.parquet", tmp_path / "saved"):
        assert answers(name) == [names.int2str(each) for each in (1, 0)] == ["dog", "cat"]
        first = open_rows(find_data_files(str(name), key="task.data")[0])[0]
        assert first["all"] == ["cat", "dog"] and first["s"] == {"kind": "dog", "n": 1}


def test_a_label_that_is_none_is_no_answer(tmp_path: Path) -> None:
    features = datasets.Features({"question": datasets.Value("string"), "answer": datasets.ClassLabel(names=["cat", "dog"])})
    datasets.Dataset.from_list([{"question": "?", "answer": -1}], features=features).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"^a.parquet row 0: answer: is missing"):
        answers(tmp_path / "a.parquet")


NONSENSE = [b"no json", b"[1]", b'{"info": 3}', b'{"info": {"features": [1]}}', b'{"info": {"features": {"answer": 5}}}']


@pytest.mark.parametrize("metadata", NONSENSE)
def test_a_schema_that_says_nonsense_is_no_error(metadata: bytes, tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS[:1]).replace_schema_metadata({b"huggingface": metadata})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    assert answers(tmp_path / "a.arrow") == ["0"]


def test_a_folder_of_imagefolder_is_read_as_it_is(tmp_path: Path) -> None:
    """A folder with metadata.csv and images is read, also with one folder per split. Oracle:
    `datasets` on the same folder.
    """
    for split, color in (("train", "red"), ("test", "blue")):
        (tmp_path / "flat" / split).mkdir(parents=True)
        (tmp_path / "flat" / split / "0.png").write_bytes(make_png(color))
    (tmp_path / "flat" / "train" / "metadata.csv").write_text("file_name,question,answer\n0.png,Which color?,red\n")
    (tmp_path / "flat" / "test" / "metadata.csv").write_text("file_name,question,answer\n0.png,Which color?,blue\n")
    with pytest.raises(ValueError, match=r"contains the splits test, train"):
        answers(tmp_path / "flat")
    theirs = datasets.load_dataset("imagefolder", data_dir=str(tmp_path / "flat" / "train"), cache_dir=str(tmp_path / "hf"))["train"]
    (ours,) = load_questions([str(tmp_path / "flat" / "train")], images_root="", name="train")
    assert ours.payload["images"][0].open().tobytes() == theirs[0]["image"].convert("RGB").tobytes()
    assert ours.payload["question"] == "<image>\nWhich color?" and ours.payload["extra"] == {}
    (tmp_path / "flat" / "train" / "0.png").unlink()
    with pytest.raises(ValueError, match=r"^metadata.csv row 0: file_name: no such file .*train/0.png"):
        answers(tmp_path / "flat" / "train")
