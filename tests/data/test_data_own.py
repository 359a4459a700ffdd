"""Tests data in the formats of other projects: rows of other trainers, columns with other names,
folders, Hugging Face datasets and truncated images.

Oracles: payloads written by hand, and files written by pyarrow and Pillow.
"""

import base64
import pickle
import re
import tempfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from megatron_rl.config import ColumnSettings
from megatron_rl.data.answers import extract_answer
from megatron_rl.data.questions import load_questions, open_questions
from megatron_rl.data.survey import survey_questions
from megatron_rl.types import Example
from tests.support.data_files import make_png, write_rows


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write Arrow copies to a folder of the test."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cache"))


def test_files_of_other_trainers(tmp_path: Path) -> None:
    """The same question in the formats of TRL, ms-swift and R1-V has the same payload. Oracle: the
    payload by hand.
    """
    image, solution = [{"bytes": make_png("red")}], "<think>It is.</think>\n<answer> red </answer>"
    system, asked = {"role": "system", "content": "Be brief."}, "Which color?"
    parts = [{"type": "image"}, {"type": "text", "text": asked}]
    rows = [
        {"prompt": [system, {"role": "user", "content": parts}], "solution": solution, "images": image},
        {"prompt": [system, {"role": "user", "content": asked}], "answer": "red", "image": image[0]},
        {"messages": [system, {"role": "user", "content": f"<image>{asked}"}], "solution": "red", "images": image},
        {"messages": [{"role": "user", "content": f"<image>{asked}"}, {"role": "assistant", "content": "blue"}], "system": "Be brief.",
         "solution": "$\\boxed{red}$", "images": image},
        {"problem": asked, "solution": solution, "image": image[0], "system": "Be brief."},
        {"prompt": asked, "answer": "\\boxed{red}", "image": image[0], "system": "Be brief."},
    ]  # fmt: skip
    found = load_questions([str(write_rows(tmp_path / "theirs.jsonl", rows))], images_root="", name="train")
    payloads = [example.payload for example in found]
    assert [[image.open().getpixel((0, 0)) for image in payload["images"]] for payload in payloads] == [[(255, 0, 0)]] * 6
    assert found[3].where == "theirs.jsonl row 3"
    told = [(p["question"].replace("<image>\n", "<image>"), p["answer"], p["system"], p["extra"]) for p in payloads]
    assert told == [("<image>Which color?", "red", "Be brief.", {})] * 6


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("4", "4"), ("<answer>4</answer>", "4"), ("<answer>3</answer> no: <answer>\n4 cm\n</answer>", "4 cm"),
        ("<answer>\\boxed{4}</answer>", "4"), ("so \\boxed{1}, or \\boxed{\\frac{1}{2^{3}}}.", "\\frac{1}{2^{3}}"),
        ("\\boxed{", "\\boxed{"),
        ("a <b> c", "a <b> c"),
    ],
)  # fmt: skip
def test_answers_are_unwrapped(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "?", "answer": float("nan")}, "answer: is nan, which is not a finite number; remove"),
        ({"question": "?", "answer": float("-inf")}, "answer: is -inf, which is not a finite number; remove"),
        ({"question": "?", "answer": True}, 'answer: is true; write the expected word, for example "yes" or "no'),
        ({"question": "?", "answer": "<answer> </answer>"}, "answer: is empty"),
        (
            {"question": "?", "answer": "a", "image": "https://x.org/a.png"},
            "image: https://x.org/a.png is a URL, which is not supported; down",
        ),
        ({"question": "?", "answer": "a", "images": [{"path": "s3://b/a.png"}]}, r"images\[0\]: s3://b/a.png is a URL"),
    ],
)
def test_what_must_not_be_trained_on(row: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^own.jsonl row 0: {said}"):
        load_questions([str(write_rows(tmp_path / "own.jsonl", [row]))], images_root="", name="train")


def test_columns_by_other_names(tmp_path: Path) -> None:
    """A column that the settings name takes precedence over columns with recognized names. If it is
    missing, the error names file and row.
    """
    row = {"q": "What?", "a": "4", "pics": [{"bytes": make_png("lime")}], "question": "no", "answer": "no", "image": "no.png",
           "prompt": "no", "reward_model": {"ground_truth": "no"}, "extra_info": {"question": "no", "answer": "no", "kept": 1}}  # fmt: skip
    columns = ColumnSettings(question="q", answer="a", images="pics")

    def one(columns: ColumnSettings, *rows: dict) -> dict:
        return load_questions([str(write_rows(tmp_path / "own.jsonl", list(rows)))], images_root="", name="train", columns=columns)[
            0
        ].payload

    payload = one(columns, row)
    assert (payload["question"], payload["answer"], payload["extra"]) == ("<image>\nWhat?", "4", {"kept": 1})
    assert payload["images"][0].open().getpixel((0, 0)) == (0, 255, 0)
    with pytest.raises(ValueError, match=r"^own.jsonl row 1: a: is missing, but task.data.columns names it; the row has the columns q"):
        one(columns, row, {"q": "What?"})
    with pytest.raises(ValueError, match=r"^task.data.columns.images=pcs: no row has that column; columns: question, answer$"):
        one(ColumnSettings(images="pcs"), {"question": "?", "answer": "4"})


def test_folders_and_data_sets_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Datasets are read as save_to_disk writes them (Arrow streams), in the layout of the Hugging
    Face hub (Parquet), and by their name from the hub's cache.
    """
    rows = {split: [{"question": "?", "answer": f"{split} {number}"} for number in range(5)] for split in ("train", "test")}
    saved, hub = tmp_path / "saved", tmp_path / "hub"
    for split, of_split in rows.items():
        (saved / split).mkdir(parents=True)
        for shard in range(2):
            table = pa.Table.from_pylist(of_split[3 * shard : 3 * shard + 3])
            path = saved / split / f"data-{shard:05d}-of-00002.arrow"
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
                stream.write_table(table, max_chunksize=2)
            (saved / split / "state.json").write_text("{}")
    (saved / "train" / "cache-12.arrow").write_bytes(b"an intermediate result")
    snapshot = hub / "datasets--me--colors" / "snapshots" / "abc"
    (snapshot / "data").mkdir(parents=True)
    (hub / "datasets--me--colors" / "refs").mkdir()
    (hub / "datasets--me--colors" / "refs" / "main").write_text("abc")
    for split, of_split in rows.items():
        write_rows(snapshot / "data" / f"{split}-00000-of-00001.parquet", of_split)
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(hub))

    def answers(name: str) -> list[str]:
        found = pickle.loads(pickle.dumps(load_questions([name], images_root="", name="train")))
        return [example.payload["answer"] for example in found]

    for name in (str(saved / "train"), f"{saved}:train", f"{snapshot}:train", "me/colors:train"):
        assert answers(name) == [f"train {number}" for number in range(5)], name
    assert answers("me/colors:test") == answers(f"{saved}:test") == [f"test {number}" for number in range(5)]
    file_format = tmp_path / "one.arrow"
    with pa.OSFile(str(file_format), "wb") as file, pa.ipc.new_file(file, pa.schema([("question", pa.string())])) as writer:
        writer.write_table(pa.table({"question": ["?"]}))
    for name, said in {
        str(saved): "contains the splits test, train; choose one of them, ",
        "me/colors": "contains the splits test, train; choose one of them, me/colors:test",
        f"{saved}:dev": "contains no files of the split dev",
        "me/shapes": f"no such file (looked at {Path.cwd()}/me/shapes), and no such data set in the Hugging Face cache; ",
        str(hub / "datasets--me--colors" / "refs"): "contains no files that end in .parquet, .arrow, .jsonl, .ndjson, .json",
        "no.jsonl": "no such file",
    }.items():
        with pytest.raises(ValueError, match=re.escape(f"task.data.train={name}: {said}")):
            answers(name)
    with pytest.raises(ValueError, match=r"^one.arrow row 0: answer: is missing"):
        answers(str(file_format))


def test_pictures_that_are_cut_off_are_refused_at_the_start(tmp_path: Path) -> None:
    """Truncated images in five formats are refused, as files and as bytes. A complete image with
    trailing bytes is accepted. TIFF is not included.
    """
    pixels = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        buffer = BytesIO()
        pixels.save(buffer, format=form)
        whole = buffer.getvalue()
        for number, (content, is_whole) in enumerate(((whole, True), (whole + b"behind it" * 3, True), (whole[:-200], False))):
            (tmp_path / f"{number}").write_bytes(content)
            for value in (f"{number}", {"bytes": content}):
                path = write_rows(tmp_path / "own.jsonl", [{"question": "?", "answer": "a", "image": value}])
                found = survey_questions(open_questions([str(path)], images_root="", name="train"))
                assert bool(found.errors) != is_whole, (form, number)
                assert all(line.startswith("own.jsonl row 0: image: ") for line in found.errors)


def test_a_source_column_that_no_row_has(tmp_path: Path) -> None:
    """Otherwise the rows would silently be scored by another comparison rule."""
    path = str(write_rows(tmp_path / "mine.jsonl", [{"question": "?", "answer": "1", "kind": "vstar"}]))
    named = ColumnSettings(data_source="kind")
    assert load_questions([path], images_root="", name="train", columns=named)[0].payload["data_source"] == "vstar"
    with pytest.raises(ValueError, match=r"^task.data.columns.data_source=kinds: no row has that column; columns: question, answer, kind$"):
        load_questions([path], images_root="", name="train", columns=ColumnSettings(data_source="kinds"))


def test_pictures_inside_of_messages(tmp_path: Path) -> None:
    """Images in message parts are read at the position of their part, as in transcripts. A web
    address is refused.
    """
    (tmp_path / "a.png").write_bytes(make_png(size=(30, 20)))
    url = f"data:image/png;base64,{base64.b64encode(make_png(size=(8, 9))).decode()}"

    def asked(*parts: dict[str, object]) -> Example:
        row = {"messages": [{"role": "user", "content": list(parts)}], "solution": "1"}
        (example,) = load_questions([str(write_rows(tmp_path / "mine.jsonl", [row]))], images_root="", name="train")
        return example

    first, second = {"type": "image", "image": "a.png"}, {"type": "image_url", "image_url": {"url": url}}
    example = asked(first, {"type": "text", "text": "or "}, second, {"type": "text", "text": "?"})
    assert example.payload["question"] == "<image>or <image>?"
    assert [image.size() for image in example.payload["images"]] == [(30, 20), (8, 9)]
    with pytest.raises(ValueError, match=r"^mine.jsonl row 0: messages\[0\].content\[0\].image_url: .*is a URL, which is not supported"):
        asked({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, {"type": "text", "text": "?"})
