"""Tests rows of JSON lists, JSON lines and Parquet. Oracles: the json module and pandas reading the
whole file, and the process's peak memory.
"""

import json
import pickle
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.data import list_rows, rows
from megatron_rl.data.rows import open_rows
from tests.conftest import ROOT
from tests.support.data_files import SUFFIXES, write_rows


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write Arrow copies to a folder of the test."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


TABLE = [{"a": index, "t": "\u00fc\u4e2d" * index + '"]},{[\\', "none": None, "s": {"x": None, "y": [1.5, index]}} for index in range(7)]
PLAIN = [{"a": index, "t": "\u00fc\u4e2d" * index + '"]},{[\\', "s": {"y": [1.5, index]}} for index in range(7)]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_three_formats_give_equal_rows(suffix: str, tmp_path: Path) -> None:
    read = open_rows(write_rows(tmp_path / f"table{suffix}", TABLE))
    assert len(read) == 7
    assert list(read) == PLAIN
    assert read[-1] == PLAIN[6] and read[3] == PLAIN[3]
    with pytest.raises(IndexError):
        read[7]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rows_travel_to_another_process_and_between_threads(suffix: str, tmp_path: Path) -> None:
    read = pickle.loads(pickle.dumps(open_rows(write_rows(tmp_path / f"table{suffix}", TABLE))))
    with ThreadPoolExecutor(8) as pool:
        places = [place % 7 for place in range(400)]
        assert list(pool.map(lambda place: read[place], places)) == [PLAIN[place] for place in places]


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_a_file_that_changes_under_a_run_is_no_other_question(suffix: str, tmp_path: Path) -> None:
    """The file is rewritten with the same rows in another order. A read of a row then fails,
    because the row's bytes may belong to another row, which would be trained on silently.
    """
    path = write_rows(tmp_path / f"table{suffix}", PLAIN)
    read = open_rows(path)
    assert list(read) == PLAIN
    write_rows(path, PLAIN[::-1])
    for place in range(7):
        with pytest.raises(ValueError, match=rf"^table{suffix} row {place}: the file has changed since the run began; "):
            read[place]
    assert list(open_rows(path)) == PLAIN[::-1]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    table=st.lists(st.dictionaries(st.text(), JSON, max_size=4), max_size=6),
    chunk=st.integers(1, 40),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
    mark=st.sampled_from(["", "\ufeff"]),
)
def test_any_json_is_found_wherever_a_chunk_ends(
    table: list[dict], chunk: int, indent: int | None, ascii_only: bool, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (rows, list_rows):
        monkeypatch.setattr(module, "_CHUNK", max(chunk, len(mark.encode()) + 1))
    as_list, as_lines = tmp_path / "any.json", tmp_path / "any.jsonl"
    as_list.write_bytes((mark + json.dumps(table, indent=indent, ensure_ascii=ascii_only)).encode())
    as_lines.write_bytes((mark + "\n\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in table)).encode())
    assert list(open_rows(as_list)) == list(open_rows(as_lines)) == [without_nulls(row) for row in table]


def without_nulls(row: dict) -> dict:
    """Remove nulls in a way that is independent of the code under test: the json module's hook
    receives every object.
    """
    return json.loads(json.dumps(row), object_pairs_hook=lambda pairs: {key: value for key, value in pairs if value is not None})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('[{"a": 1}, {"a": ', r"is truncated or not a JSON list: no complete row begins at byte 11"),
        ('[{"a": 1}, {]', r"no complete row begins at byte 11"),
        ("[", r"no complete row begins at byte 1"),
        ('[{"a": 1}', r"no complete row begins at byte 1 \(the closing \] is missing\)"),
        ('[{"a": 1},', r"no complete row begins at byte 9"),
        ("[1", r"no complete row begins at byte 1"),
        ('[{"a": 1}]\n[{"a": 2}]\n', r"contains text at byte 11, after the closing \] of its list; write all rows into one list"),
        ('[{"a": 1}] {"a": 2}', "contains text at byte 11, after the closing"),
        ('[{"a": 1}]]garbage', "contains text at byte 10, after the closing"),
        ('[{"a": 1}]' + " " * 50 + "x", "contains text at byte 60, after the closing"),
        ("[],", "contains text at byte 2, after the closing"),
        ('[{"a": 1}{"a": 2}]', "is not a JSON list: no comma between row 0 and the text at byte 9"),
        ('[{"a": 1}, {"a": 2}\n{"a": 3}]', "no comma between row 1 and the text at byte 20"),
        ('[{"a": 1},, {"a": 2}]', "no row before the , at byte 10; add the row, or remove the comma"),
        ('[{"a": 1}, ]', r"no row before the \] at byte 11"),
        ('[, {"a": 1}]', "no row before the , at byte 1"),
        ('{"1": {"a": 1}, "2": {"a": 2}} {"a": 3}', "byte 29 is neither the start of a row nor the end of the object"),
        ('{"1": {"a": 1} "2": {"a": 2}}', "byte 14 is neither the start of a row nor the end"),
        ('{"1": {"a": 1},, "2": {"a": 2}}', "byte 14 is neither the start of a row nor the end"),
        ('{"1": {"a": 1}, }', "byte 14 is neither the start of a row nor the end"),
    ],
)
@pytest.mark.parametrize("chunk", [3, 1 << 20])
def test_a_list_that_is_cut_off_or_goes_on(content: str, said: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No part of a file is ignored silently, wherever a chunk ends."""
    monkeypatch.setattr(list_rows, "_CHUNK", chunk)
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"^task.data=.*bad.json: .*{said}"):
        open_rows(path)


def test_a_row_that_is_no_json_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n\n[1]\n{"a": "\xff"}\n' + b"[" * 100_000 + b'\n{"a": 2}\n')
    read = open_rows(path)
    assert read[0] == {"a": 1} and read[5] == {"a": 2}
    for place, said in enumerate(
        ("is not valid JSON", "must be a JSON object, not list", "is not valid JSON", "is not valid JSON"), start=1
    ):
        with pytest.raises(ValueError, match=f"^bad.jsonl row {place}: {said}"):
            read[place]


@pytest.mark.parametrize("name", ["none.json", "none.jsonl", "none.parquet"])
def test_a_file_that_is_not_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^task.data=.*{name}: no such file$"):
        open_rows(tmp_path / name)


def test_a_damaged_parquet_file_leaves_no_copy(tmp_path: Path, cache: Path) -> None:
    path = write_rows(tmp_path / "bad.parquet", TABLE)
    whole = path.read_bytes()
    for damaged in (b"", b"PAR1", whole[:-9], whole[:4] + b"\xff" * 200 + whole[204:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"^task.data=.*bad.parquet: could not be read as Parquet"):
            open_rows(path)
    assert not [left for left in cache.rglob("*") if left.suffix in (".arrow", ".partial")]


def test_a_row_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 1000)
    monkeypatch.setattr(list_rows, "_CHUNK", 100)
    for name, content in {"a.json": '[{"a": "' + "x" * 5000, "b.jsonl": '{"a": "' + "x" * 5000}.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match="contains a row of more than 0 MiB; write one row per line"):
            open_rows(tmp_path / name)


def test_parquet_is_copied_once_and_again_when_it_changed(tmp_path: Path, cache: Path) -> None:
    path = write_rows(tmp_path / "table.parquet", TABLE)
    open_rows(path)
    (copy,) = cache.rglob("*.arrow")
    made = copy.stat().st_mtime_ns
    assert list(open_rows(path)) == PLAIN and copy.stat().st_mtime_ns == made
    write_rows(path, TABLE[:3])
    assert list(open_rows(path)) == PLAIN[:3]


def test_row_groups_and_dictionaries_as_pandas_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    frame = pd.DataFrame({"n": range(5000), "kind": pd.Categorical([f"k{number % 7}" for number in range(5000)])})
    pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), path, row_group_size=333)
    assert list(open_rows(path)) == pd.read_parquet(path).to_dict("records")


def test_a_dictionary_of_its_own_in_each_row_group(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    frames = [pd.DataFrame({"n": [0, 1, 2], "kind": pd.Categorical(kinds)}) for kinds in (["a", "b", "a"], ["c", None, "a"])]
    tables = [pa.Table.from_pandas(frame, preserve_index=False) for frame in frames]
    with pq.ParquetWriter(path, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    assert pa.types.is_dictionary(pq.read_schema(path).field("kind").type) and pq.ParquetFile(path).num_row_groups == 2
    kinds = [{"kind": kind} if kind else {} for kind in ("a", "b", "a", "c", None, "a")]
    assert list(open_rows(path)) == [{"n": place % 3} | kind for place, kind in enumerate(kinds)]


WRITES = """
import json, sys
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
rng = np.random.default_rng(0)
path, num_rows = sys.argv[1], int(sys.argv[2])
def row(index):
    image = rng.bytes(8_000)
    return {"id": index, "images": [{"bytes": image if path.endswith("parquet") else image.hex()}]}
if path.endswith("parquet"):
    with pq.ParquetWriter(path, pa.Table.from_pylist([row(0)]).schema) as writer:
        writer.write_table(pa.Table.from_pylist([row(index) for index in range(num_rows)]), row_group_size=num_rows)
else:
    as_list = path.endswith("json")
    with open(path, "w") as file:
        file.write("[" if as_list else "")
        for index in range(num_rows):
            file.write((",\\n" if as_list and index else "") + json.dumps(row(index)) + ("" if as_list else "\\n"))
        file.write("]" if as_list else "")
"""
READS = """
import re, sys
from pathlib import Path
from megatron_rl.data.rows import open_rows
def peak_mib():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024
before = peak_mib()
read = open_rows(Path(sys.argv[1]))
assert [row["id"] for row in read] == list(range(len(read)))
print(len(read), peak_mib() - before)
"""
"""READS uses VmHWM instead of ru_maxrss, because a child inherits ru_maxrss from its parent
process.
"""


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_memory_does_not_grow_with_the_file(suffix: str, tmp_path: Path) -> None:
    """A file of at least 240 MB (Parquet with a single row group) is opened and read to its end
    with less than 100 MiB of additional memory.
    """
    path = tmp_path / f"large{suffix}"
    run = {"cwd": ROOT, "check": True, "timeout": 120, "env": {"PATH": "", "TMPDIR": str(tmp_path)}}
    num_rows = 30_100 if suffix == ".parquet" else 15_000
    subprocess.run([sys.executable, "-c", WRITES, str(path), str(num_rows)], **run)
    assert path.stat().st_size > 240e6
    said = subprocess.run([sys.executable, "-c", READS, str(path)], capture_output=True, text=True, **run).stdout
    num_read, peak_mib = map(int, said.split())
    assert num_read == num_rows
    assert peak_mib < 100
