"""Tests data files and images that expand to far more than their size, or that refer to other
files. Each is refused with one line, within 100 MB and 10 s, and without temporary files.
"""

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from megatron_rl.data import parquet_copy
from megatron_rl.data.questions import load_questions
from megatron_rl.data.rows import open_rows
from tests.support import bombs
from tests.support.reader_cost import is_cheap, measure_reads


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bombs")


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for the copies of Parquet files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def made(folder: Path, name: str, make: object) -> Path:
    make(folder / name)
    assert (folder / name).stat().st_size < 1 << 20 or name.startswith("sparse")
    return folder / name


@pytest.mark.parametrize("name", bombs.PARQUETS)
def test_a_parquet_file_takes_what_its_size_allows(name: str, folder: Path, copies: Path) -> None:
    """A Parquet file is refused within 100 MB and 20 s of CPU time, and only the lock file remains.
    One of the files has 1 KB and would expand to 2.5 GB. pyarrow itself would use GiBs for a
    batch.
    """
    path = made(folder, f"{name}.parquet", bombs.PARQUETS[name])
    (own,) = measure_reads(("rows", path))
    assert own.error.startswith("ValueError: ") and "could not be read as Parquet" in own.error and "\n" not in own.error
    assert any(why in own.error for why in ("malloc", "File too large", "a row of", "signal")), own
    assert own.mb <= 100 and own.cpu_s <= 20, own
    assert sum(each.stat().st_size for each in copies.rglob("*") if each.is_file()) == 0


def test_a_parquet_file_is_read_below_limits_of_the_users_own(tmp_path: Path) -> None:
    """The copy works with user limits below its own limits, such as a cluster's hard `ulimit
    -t`.
    """
    pq.write_table(pa.table({"question": ["?"]}), tmp_path / "one.parquet")
    command = f"ulimit -t 5; exec {sys.executable} -P {parquet_copy.__file__} {tmp_path}/one.parquet {tmp_path}/one.arrow"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done


@pytest.mark.parametrize("name", ["one text", "one list"])
def test_by_itself_pyarrow_takes_the_memory(name: str, folder: Path) -> None:
    (control,) = measure_reads(("by parquet", made(folder, f"control {name}.parquet", bombs.PARQUETS[name])))
    assert control is None or control.mb > 200 or "Error" in control.error


def test_arrow_files(folder: Path) -> None:
    """Compressed zeros, two thousand million rows, and a text that ends far behind its column are
    refused. As a control, pyarrow itself expands the first file.
    """
    paths = [
        made(folder, "zeros.arrow", bombs.arrow_of_one_column),
        made(folder, "nulls.arrow", bombs.arrow_of_nulls),
        made(folder, "outside.arrow", bombs.arrow_out_of_bounds),
    ]
    assert all(is_cheap(each) for each in measure_reads(*(("rows", path) for path in paths)))
    inflated, _, followed = [measure_reads(("by arrow", path))[0] for path in paths]
    assert inflated.mb > 200
    assert followed is None or followed.mb > 500 or "ArrowInvalid" not in followed.error


def test_arrow_files_that_are_compressed_are_read(tmp_path: Path) -> None:
    """The limit applies to the expanded size; compression itself is permitted."""
    table = pa.table({"question": ["one", "two"] * 50, "answer": pa.array(["a", "b"] * 50).dictionary_encode()})
    path = tmp_path / "small.arrow"
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer,
    ):
        writer.write_table(table)
    assert [row["question"] for row in open_rows(path)] == ["one", "two"] * 50


def test_deep_rows_and_great_pictures(folder: Path) -> None:
    """900 nested lists, sparse images of 200 GB, and a JPEG with 3000 copies of its last scan are
    refused.
    """
    deep, scans = made(folder, "deep.jsonl", bombs.json_of_depth), made(folder, "scans.jpg", bombs.jpeg_of_scans)
    bombs.write_sparse_file(folder / "sparse.png", 200 * bombs.GIB, b"\x89PNG")
    bombs.write_sparse_file(folder / "sparse.tif", 200 * bombs.GIB, b"II*\0\x08\0\0\0\x01\0\x0e\x01\x02\0\xff\xff\xff\xff\x10\0\0\0")
    found = measure_reads(("rows", deep), ("picture", folder / "sparse.png"), ("picture", folder / "sparse.tif"), ("picture", scans))
    assert ["recursion" in found[0].error, *("bytes, more than" in each.error for each in found[1:3]), "scans" in found[3].error] == [
        True
    ] * 4
    assert all(is_cheap(each) for each in found[:1])
    assert all(each.mb <= 100 and each.cpu_s <= 10 for each in found[1:])


def rows_that_name(path: Path, *pictures: object) -> str:
    path.write_text("".join(json.dumps({"question": "q", "answer": "a", "image": each}) + "\n" for each in pictures))
    return str(path)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Create own/ with the images of a data file, private/ with another user's image, and links
    between them.
    """
    for name in ("own/pictures", "private"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (30, 30)).save(tmp_path / name / "x.png")
    (tmp_path / "own" / "link.png").symlink_to(tmp_path / "private" / "x.png")
    (tmp_path / "own" / "linked").symlink_to(tmp_path / "private")
    return tmp_path


@pytest.mark.parametrize("name", ["../private/x.png", "{disk}/private/x.png", "link.png", "linked/x.png", "pictures/../../private/x.png"])
def test_rows_name_pictures_below_their_folder(name: str, disk: Path) -> None:
    """An image outside the data file's folder is refused: with .., as an absolute path, and through
    a link, as text and as a mapping. The error names the setting that permits the folder.
    """
    name = name.format(disk=disk)
    for given in (name, {"path": name}):
        data = rows_that_name(disk / "own" / "rows.jsonl", "pictures/x.png", given)
        with pytest.raises(ValueError, match=rf"rows.jsonl row 1: image: .* is outside of .*; task.data.image_roots=\[{disk}/private\]"):
            load_questions([data], images_root="", name="train")
        assert len(load_questions([data], images_root="", image_roots=[str(disk / "private")], name="train")) == 2


def test_what_users_name_themselves_is_theirs(disk: Path) -> None:
    """task.data.images, a folder in task.data.train, and absolute paths below the data file's
    folder need no additional setting.
    """
    data = rows_that_name(disk / "own" / "rows.jsonl", "x.png", str(disk / "own" / "pictures" / "x.png"))
    assert len(load_questions([data], images_root=str(disk / "private"), name="train")) == 2
    (disk / "own" / "data").mkdir()
    rows_that_name(disk / "own" / "data" / "train.jsonl", "../pictures/x.png")
    os.unlink(data)
    assert len(load_questions([str(disk / "own")], images_root="", name="train")) == 1


def test_a_hub_data_set_in_the_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file of a dataset in the hub's cache is a link to blobs/, outside of its folder."""
    home = tmp_path / "datasets--org--name"
    snapshot = home / "snapshots" / ("0" * 40)
    for part in (home / "blobs", home / "refs", snapshot):
        part.mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40)
    Image.new("RGB", (30, 30)).save(home / "blobs" / "b1", format="PNG")
    rows_that_name(home / "blobs" / "b2", "x.png")
    (snapshot / "x.png").symlink_to("../../blobs/b1")
    (snapshot / "train.jsonl").symlink_to("../../blobs/b2")
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert len(load_questions(["org/name"], images_root="", name="train")) == 1


def test_a_copier_whose_starter_was_killed_keeps_others_from_its_copy(tmp_path: Path) -> None:
    """A copy process whose parent was killed keeps the lock until it ends. A second process
    therefore cannot write to the same file at the same time.
    """
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "rows.parquet")
    (tmp_path / "slow.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    begin = (
        "import sys\nfrom pathlib import Path\nfrom megatron_rl.data import parquet_copy, rows\n"
        "parquet_copy.__file__ = sys.argv[2]\nrows.open_rows(Path(sys.argv[1]))\n"
    )
    command = [sys.executable, "-c", begin, tmp_path / "rows.parquet", tmp_path / "slow.py"]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}) as starter:
        until(lambda: any("slow.py" in " ".join(child.cmdline()) for child in psutil.Process(starter.pid).children()))
        (copier,) = psutil.Process(starter.pid).children()
        starter.kill()
    (lock,) = tmp_path.glob("megatron_rl-*/*.lock")
    with lock.open("w") as mine:
        with pytest.raises(BlockingIOError):
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        copier.kill()
        fcntl.flock(mine, fcntl.LOCK_EX)


def until(holds: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
