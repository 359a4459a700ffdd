"""Extraction of images from a Parquet file. Oracles: pixels painted by the test, Pillow's JPEG
encoder, pandas, and interrupted and repeated runs.
"""

import tempfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from megatron_rl.data.questions import load_questions
from megatron_rl_tools.data import extract_images_from_parquet as tool
from megatron_rl_tools.data.extract_images_from_parquet import file_name, main
from tests.support.data_files import make_png, write_rows


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redirect Arrow copies to a temporary folder of the test."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cache"))


def noise(seed: int) -> bytes:
    buffer = BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (40, 60, 3), dtype=np.uint8)).save(buffer, format="PNG")
    return buffer.getvalue()


def is_jpeg_of(path: Path, content: bytes) -> bool:
    """Return True if the file has the pixels that Pillow's JPEG encoder produces at quality 95."""
    by_hand = BytesIO()
    Image.open(BytesIO(content)).save(by_hand, format="JPEG", quality=95)
    with Image.open(path) as written, Image.open(by_hand) as oracle:
        return np.array_equal(np.asarray(written), np.asarray(oracle))


def row(name: object, *contents: bytes) -> dict:
    return {"extra_info": {"image_file_name": name, "question": "?"}, "images": [{"bytes": content} for content in contents], "answer": "x"}


def run(path: Path, out: Path) -> int:
    return main(["--parquet", str(path), "--out", str(out), "--threads", "4"])


def test_pictures_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(f"{number % 5}/pic{number}.png", noise(number)) for number in range(150)]
    rows += [row("clear.webp", make_png((255, 0, 0, 0), mode="RGBA")), row("pic", noise(0)), row("0/pic0.png", noise(0))]
    path, out = write_rows(tmp_path / "train.parquet", rows), tmp_path / "out"
    assert run(path, out) == 0
    assert capsys.readouterr().out == f"153 rows, 152 images in {out}/images; table {out}/train_with_image_paths.parquet\n"
    table = pd.read_parquet(out / "train_with_image_paths.parquet")
    expected = [f"{number % 5}/pic{number}.jpg" for number in range(150)] + ["clear.jpg", "pic.jpg", "0/pic0.jpg"]
    assert list(table["image_file_name"]) == expected
    assert list(table["image_file_path"]) == [f"images/{name}" for name in expected]
    assert list(table["image_file_size"]) == [(out / "images" / name).stat().st_size for name in expected]
    assert list(table["answer"]) == ["x"] * 153 and table["extra_info"][3]["question"] == "?"
    assert [list(images) for images in table["images"]] == [[{"path": f"images/{name}"}] for name in expected]
    assert is_jpeg_of(out / "images" / "2" / "pic7.jpg", noise(7))
    with Image.open(out / "images" / "clear.jpg") as clear:
        assert clear.getpixel((0, 0)) == (255, 255, 255)
    assert not list(out.rglob("*.partial"))
    found = load_questions([str(out / "train_with_image_paths.parquet")], images_root="", name="train")
    assert found[150].payload["images"][0].open().size == (30, 20)


def test_lists_of_names(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "train.parquet", [row(["a.png", "b.png"], noise(1), noise(2)), row([]), row(["c.png"], noise(3))])
    assert run(path, tmp_path) == 0
    table = pd.read_parquet(tmp_path / "train_with_image_paths.parquet")
    assert [list(names) for names in table["image_file_name"]] == [["a.jpg", "b.jpg"], [], ["c.jpg"]]


def test_a_run_that_was_ended_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    contents = [noise(number) for number in range(200)]
    contents[150] = contents[150][: len(contents[150]) // 2]
    path, out = tmp_path / "train.parquet", tmp_path / "out"
    write_rows(path, [row(f"{number}.png", content) for number, content in enumerate(contents)])
    assert run(path, out) == 1
    assert capsys.readouterr().err.startswith("error: train.parquet row 150: images[0]: cannot be opened")
    assert not (out / "train_with_image_paths.parquet").exists()
    before = {file: file.stat().st_mtime_ns for file in (out / "images").iterdir()}
    assert len(before) >= 128
    contents[150], contents[3] = noise(150), noise(1000)
    write_rows(path, [row(f"{number}.png", content) for number, content in enumerate(contents)])
    (out / "images" / "4.jpg").unlink()
    opened = []
    monkeypatch.setattr(tool.StoredImage, "open", lambda image, real=tool.StoredImage.open: opened.append(image.where) or real(image))
    assert run(path, out) == 0
    assert all(file.stat().st_mtime_ns == moment for file, moment in before.items() if file.name not in ("3.jpg", "4.jpg"))
    assert len(opened) == 200 - (len(before) - 2)
    assert is_jpeg_of(out / "images" / "3.jpg", noise(1000)) and is_jpeg_of(out / "images" / "4.jpg", noise(4))
    assert len(pd.read_parquet(out / "train_with_image_paths.parquet")) == 200


def test_files_that_the_tool_did_not_write_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files that the tool did not write are not overwritten: the row's own source image, a JPEG of
    another program with a comment, a file that is not an image, and a dangling link.
    """
    (tmp_path / "images").mkdir()
    Image.open(BytesIO(noise(0))).save(tmp_path / "images" / "own.jpg", quality=80)
    Image.open(BytesIO(noise(1))).save(tmp_path / "images" / "scan.jpg", comment="scanned")
    (tmp_path / "images" / "notes.jpg").write_text("notes")
    before = {file: file.read_bytes() for file in (tmp_path / "images").iterdir()}
    (tmp_path / "images" / "link.jpg").symlink_to("nowhere.jpg")
    extra = {"extra_info": {"image_file_name": "own.jpg"}}
    rows = {"own": extra | {"images": [{"path": "images/own.jpg"}]}} | {
        name: row(f"{name}.png", noise(1)) for name in ("scan", "notes", "link")
    }
    for name, given in rows.items():
        assert run(write_rows(tmp_path / "t.parquet", [given]), tmp_path) == 1
        target = tmp_path / "images" / f"{name}.jpg"
        said = f"error: t.parquet row 0: images[0]: {target} was not written by this tool and is not overwritten; choose another --out\n"
        assert capsys.readouterr().err == said
    assert all(file.read_bytes() == content for file, content in before.items())
    assert (tmp_path / "images" / "link.jpg").is_symlink() and not (tmp_path / "images" / "nowhere.jpg").exists()
    assert run(write_rows(tmp_path / "t.parquet", [rows["own"]]), tmp_path / "out") == 0


def test_the_tools_own_pictures_are_left_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second run over the same table, and a run over the table that the first run wrote, leave
    the images unchanged. Two rows that exchange their image names are refused.
    """
    path = write_rows(tmp_path / "t.parquet", [row(f"{name}.png", noise(number)) for number, name in enumerate("ab")])
    assert run(path, tmp_path) == 0
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in (tmp_path / "images").iterdir()}
    made = tmp_path / "t_with_image_paths.parquet"
    assert run(path, tmp_path) == run(made, tmp_path) == 0
    table, again = pd.read_parquet(made), pd.read_parquet(tmp_path / f"{made.stem}_with_image_paths.parquet")
    assert list(again["image_file_path"]) == list(table["image_file_path"]) == ["images/a.jpg", "images/b.jpg"]
    changed = [{"extra_info": {"image_file_name": f"{to}.jpg"}, "images": [{"path": f"images/{of}.jpg"}]} for of, to in ("ab", "ba")]
    capsys.readouterr()
    assert run(write_rows(tmp_path / "c.parquet", changed), tmp_path) == 1
    assert capsys.readouterr().err.endswith(
        f"{tmp_path}/images/b.jpg contains the image of another row and is not overwritten; choose another --out\n"
    )
    assert {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in (tmp_path / "images").iterdir()} == before


@pytest.mark.parametrize("name", ["../a.png", "/etc/a.png", "a/../../b.png", "", ".", "..", "a\\b.png", "a\0.png", "C:a.png", None, 5])
def test_names_that_leave_the_folder(name: object) -> None:
    with pytest.raises(ValueError, match=r"^here: extra_info.image_file_name .* is not a relative file path"):
        file_name(name, where="here")


NEEDS = "--parquet={path}: must have the columns images and extra_info.image_file_name"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row("../../evil.png", noise(0))], "train.parquet row 0: extra_info.image_file_name '../../evil.png' is not a relative file path"),
        ([row("a.png", noise(0)), row("a.jpg", noise(1))], "train.parquet row 1: a different image is also named a.jpg"),
        ([row("a.png", noise(0), noise(1))], "train.parquet row 0: has 2 images but 1 names in extra_info.image_file_name"),
        ([row("a.png", b"junk")], "train.parquet row 0: images[0]: cannot be opened"),
        ([{"images": [{"bytes": noise(0)}], "extra_info": {"index": 1}}], NEEDS),
        ([{"question": "?"}], NEEDS),
    ],
)
def test_what_cannot_be_done_is_said(rows: list[dict], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows(tmp_path / "train.parquet", rows)
    assert run(path, tmp_path / "out" / "deep") == 1
    assert capsys.readouterr().err.startswith("error: " + said.format(path=path))
    assert not (tmp_path / "evil.jpg").exists() and not (tmp_path / "out" / "evil.jpg").exists()
    assert not list(tmp_path.rglob("*_with_image_paths.parquet*"))


def test_a_file_that_is_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.parquet").write_bytes(b"junk")
    assert run(tmp_path / "train.parquet", tmp_path) == 1
    assert "could not be read as Parquet" in capsys.readouterr().err
    assert run(tmp_path / "none.parquet", tmp_path) == 1
    assert capsys.readouterr().err == f"error: --parquet={tmp_path}/none.parquet: no such file\n"
