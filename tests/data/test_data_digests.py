"""Tests which changes of data files prevent a run from resuming."""

import hashlib
import re
from pathlib import Path

import pytest

from megatron_rl.config import DataSettings
from megatron_rl.data.data_digests import check_same_data, data_digests


def settings_of(folder: Path, *names: str) -> DataSettings:
    return DataSettings(train=[str(folder / name) for name in names], eval=[str(folder / names[0])])


def rows(num: int) -> str:
    return "".join(f'{{"question": "q{number}", "answer": "{number}"}}\n' for number in range(num))


def test_what_is_digested_is_size_and_content(tmp_path: Path) -> None:
    """Example by hand: the digest of a small file covers its size and its content, and the digest
    of a setting covers the digests of its files in order.
    """
    (tmp_path / "a.jsonl").write_text(rows(2))
    size = len(rows(2))
    of_file = hashlib.sha256(f"{size}\n{rows(2)}".encode()).hexdigest()
    expected = hashlib.sha256(of_file.encode()).hexdigest()
    assert data_digests(settings_of(tmp_path, "a.jsonl")) == {"task.data.train": expected, "task.data.eval": expected}
    assert data_digests(DataSettings()) == {}


@pytest.mark.parametrize("change", ["another answer", "another row", "another order of files", "another file"])
def test_other_rows_are_refused_with_both_digests(change: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(rows(3))
    (tmp_path / "b.jsonl").write_text(rows(5))
    before = data_digests(settings_of(tmp_path, "a.jsonl", "b.jsonl"))
    check_same_data(before, data_digests(settings_of(tmp_path, "a.jsonl", "b.jsonl")))
    names = ("a.jsonl", "b.jsonl")
    if change == "another answer":
        (tmp_path / "b.jsonl").write_text(rows(5).replace('"answer": "4"', '"answer": "7"'))
    elif change == "another row":
        (tmp_path / "b.jsonl").write_text(rows(6))
    elif change == "another order of files":
        names = ("b.jsonl", "a.jsonl")
    else:
        names = ("a.jsonl",)
    found = data_digests(settings_of(tmp_path, *names))
    told = f"task.data.train: the data files have changed since this run began: their digest is {found['task.data.train']}, "
    told += f"but was {before['task.data.train']}; restore the original files, or choose another run.dir"
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        check_same_data(before, found)


def test_a_change_in_the_middle_of_a_large_file_is_seen(tmp_path: Path) -> None:
    """Blocks of the file are sampled over its whole length, so a change of 2 MB in a file of 64 MB
    is detected.
    """
    content = bytearray(b"x" * (64 << 20))
    (tmp_path / "large.jsonl").write_bytes(content)
    before = data_digests(settings_of(tmp_path, "large.jsonl"))
    content[20 << 20 : 22 << 20] = b"y" * (2 << 20)
    (tmp_path / "large.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match="the data files have changed since"):
        check_same_data(before, data_digests(settings_of(tmp_path, "large.jsonl")))
