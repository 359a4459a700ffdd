"""Tests the readers of PuzzleVQA and LogicVista with small hand-made files in the layout of the
authors' repositories.
"""

import json
import pickle
import re
from pathlib import Path

import pytest

from megatron_rl.config import DataSettings
from megatron_rl.data.benchmarks.catalog import compute_benchmark_metrics, load_benchmark_questions
from megatron_rl.data.rows import open_rows
from megatron_rl.types import Example, Rollout
from tests.support.data_files import make_png


def load(benchmark: str, *paths: Path, **data: object) -> list[Example]:
    given = DataSettings(eval=[str(path) for path in paths], benchmark=benchmark, **data)
    return [*load_benchmark_questions(given, "eval")]


def color(example: Example) -> tuple[int, int, int]:
    (image,) = example.payload["images"]
    return image.open().getpixel((0, 0))


def puzzle_files(folder: Path) -> list[Path]:
    """Write two puzzle kinds with two rows and one row, as one object per line in .json files."""
    about = {"caption": "There are circles.", "explanation": "They alternate.", "deduction": "It should be red."}
    rows = {
        "color_grid": [("red", ["green", "red", "blue", "gray"]), ("blue", ["blue", "red", "green", "gray"])],
        "size_cycle": [("large", ["small", "large", "medium"])],
    }
    for kind, each in rows.items():
        (folder / "images" / kind).mkdir(parents=True)
        lines = []
        for number, (answer, options) in enumerate(each):
            image = f"images/{kind}/{kind}_{number:04}.png"
            (folder / image).write_bytes(make_png("red" if kind == "color_grid" else "blue"))
            lines.append(json.dumps({"image": image, "question": "What is missing?", "answer": answer, "options": options, **about}))
        (folder / f"{kind}.json").write_text("".join(line + "\n" for line in lines))
    return [folder / f"{kind}.json" for kind in rows]


def test_puzzlevqa(tmp_path: Path) -> None:
    """The answer becomes the letter of its option; caption, explanation and deduction, which contain
    the solution, are not part of the question. The score is the mean over the kinds of puzzles.
    """
    examples = load("puzzlevqa", *puzzle_files(tmp_path))
    assert [example.payload["answer"] for example in examples] == ["B", "A", "B"]
    assert [color(example) for example in examples] == [(255, 0, 0), (255, 0, 0), (0, 0, 255)]
    assert examples[0].payload["question"] == "<image>\nWhat is missing?\nA. green\nB. red\nC. blue\nD. gray"
    assert not any("alternate" in str(example.payload["question"]) for example in examples)
    rollouts = [Rollout("vqa", "x", place, 0, reward_terms={"accuracy": float(place == 2)}) for place in range(3)]
    assert compute_benchmark_metrics("puzzlevqa", examples, rollouts) == {"official": 0.5, "puzzle_color_grid": 0, "puzzle_size_cycle": 1}
    shuffled = load("puzzlevqa", *puzzle_files(tmp_path / "again"), shuffle_options=3)
    for example in shuffled:
        official = example.payload["official"]
        assert official["options"]["ABCD".index(str(example.payload["answer"]))] in ("red", "blue", "large")
    (tmp_path / "color_grid.json").write_text('{"image": "x.png", "question": "?", "answer": "pink", "options": ["red"]}\n')
    with pytest.raises(ValueError, match=r"^color_grid.json row 0: answer: is pink, which is not one of the 1 options"):
        load("puzzlevqa", tmp_path / "color_grid.json")


def logic_row(number: int, **values: object) -> dict[str, object]:
    row = {"imagename": f"v1_{number}.png", "question": "Which choice (A-D)?", "answer": "C", "reasoning": "none", "skill": ["spatial"]}
    return row | {"broad_capability": ["diagram and ocr"], "specific_capability": ["3d shape"], "imagesource": "x", **values}


def logic_file(folder: Path, rows: dict[str, dict], *, indent: int | None = 4) -> Path:
    (folder / "images").mkdir(exist_ok=True)
    for number, row in enumerate(rows.values()):
        (folder / "images" / str(row["imagename"])).write_bytes(make_png("red" if number else "blue"))
    (folder / "dataset.json").write_text(json.dumps(rows, indent=indent))
    return folder / "dataset.json"


@pytest.mark.parametrize("indent", [4, None])
def test_logicvista(indent: int | None, tmp_path: Path) -> None:
    """Rows are sorted by the number in their key. Images lie in the folder images, or are found by
    their name alone. Options are read from the question.
    """
    listed = {"question": "True? Select from A, B, and C. (A) True (B)False (C)Insufficient Information", "answer": "B"}
    rows = {
        "v1_10": logic_row(10, capability=["ocr"]),
        "v1_0": logic_row(0, **listed),
        "v1_2": logic_row(2, answer="A, C", skill=["a", "b"]),
    }
    del rows["v1_0"]["broad_capability"]
    rows["v1_0"]["capability"] = ["diagram", "ocr"]
    examples = load("logicvista", logic_file(tmp_path, rows, indent=indent))
    assert [example.payload["answer"] for example in examples] == ["B", "A, C", "C"]
    assert [color(example) for example in examples] == [(255, 0, 0), (255, 0, 0), (0, 0, 255)]
    official = [example.payload["official"] for example in examples]
    assert official[0]["labels"] == {"skill": "spatial", "capability": "diagram and ocr"} == official[2]["labels"]
    assert official[1]["labels"] == {"skill": "a and b", "capability": "diagram and ocr"}
    assert [each["choices"] for each in official] == [("True", "False", "Insufficient Information"), (), ()]
    assert str(examples[1].payload["question"]).endswith("\nGive the letter of the right choice, or the letters if several are right.")
    flat = load("logicvista", tmp_path / "dataset.json", images=str(tmp_path / "images"))
    assert [color(example) for example in flat] == [color(example) for example in examples]


@pytest.mark.parametrize("missing", ["question", "answer"])
def test_an_empty_row_of_logicvista_is_named(missing: str, tmp_path: Path) -> None:
    rows = {"v1_0": logic_row(0), "v1_382": logic_row(382, **{missing: " "})}
    with pytest.raises(ValueError, match=rf"^dataset.json row 1: {missing}: is empty in row v1_382; .*remove it from the file"):
        load("logicvista", logic_file(tmp_path, rows))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            '{"v1_0": {}, "v1_1": {}, "w_2": {}}',
            'the key "w_2" is not v1_ and a whole number; the keys must be unique whole numbers after v1_',
        ),
        ('{"v1_0": {}, "v1_1": {}, "v1_02": {}}', 'the key "v1_02" is not v1_ and a whole number'),
        ('{"v1_0": {}, "v1_1": {}, "v1_1": {}}', "has the key v1_1 twice"),
        ('{"v1_0": {}, "v1_1": {}, "v1_2": 3}', "the value of the key v1_2 is not an object"),
        ('{"v1_0": {}, "v1_1": {}, "v1_2": {', "is truncated or not valid JSON: byte 23"),
    ],
)
def test_numbered_keys_with_a_prefix_are_checked(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text(text)
    with pytest.raises(ValueError, match="^task.data=.*dataset.json: " + re.escape(reason)):
        open_rows(tmp_path / "dataset.json")


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('{"v1_3": {"a": 1}}', [{"id": "v1_3", "a": 1}]),
        ('{"v1_3": {"a": 1}, "v1_1": {"id": "own"}}', [{"id": "own"}, {"id": "v1_3", "a": 1}]),
        ('{"image_1": {"path": "x"}, "question": "?"}', [{"image_1": {"path": "x"}, "question": "?"}]),
        ('{"image_1": "x.png", "image_2": "y.png"}', [{"image_1": "x.png", "image_2": "y.png"}]),
        ('{"extra": {"a": 1}, "more": {"b": 2}}', [{"extra": {"a": 1}, "more": {"b": 2}}]),
    ],
)
def test_one_row_with_numbered_columns_stays_one_row(text: str, rows: list[dict], tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(text)
    found = open_rows(tmp_path / "rows.json")
    assert list(found) == rows == list(pickle.loads(pickle.dumps(found)))
