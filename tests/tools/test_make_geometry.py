"""Pictures of grids, nested squares and circles. Oracles: what is counted in the pixels of the
written files, and the rules that score VLMs Are Blind.
"""

import asyncio
import collections
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from megatron_rl.config import DataSettings, TaskSettings
from megatron_rl.tasks.vqa import VqaTask
from megatron_rl.types import Turn
from megatron_rl_tools.data.geometry_scenes import KINDS, SHIFTS, TRAINED
from megatron_rl_tools.data.make_geometry import SPLITS, main, make_scenes
from tests.contracts.test_configs import settings_of
from tests.support.rollout_factory import make_reward_input

NUM_TRAIN, NUM_EVAL, SIDE = 144, 72, 112
SOLID = 0.95
"""A grid's line covers this fraction of the grid's width; what lies between lines covers less."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("geometry") / "data"
    assert main(["--out", str(out), "--num-train", str(NUM_TRAIN), "--num-eval", str(NUM_EVAL), "--seed", "5"]) == 0
    return out


def rows_of(folder: Path, split: str) -> list[tuple[str, str, str]]:
    """Return the question, the answer and the image of each row of a split."""
    names = ("question", "answer", "image") if split == "train" else ("prompt", "groundtruth", "image")
    lines = [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
    assert all(set(line) - {"task"} == set(names) for line in lines)
    return [tuple(line[name] for name in names) for line in lines]


def ink_of(path: Path) -> np.ndarray:
    """Return which pixels belong to a line: at least half covered by a color on white."""
    with Image.open(path) as picture:
        assert picture.size == (SIDE, SIDE) and picture.mode == "RGB"
        return np.asarray(picture).min(axis=2) < 128


def num_components(mask: np.ndarray) -> int:
    """Return the number of connected parts; diagonal neighbors are connected."""
    labels = np.zeros(mask.shape, dtype=np.int32)
    ndimage.label(mask, np.ones((3,) * mask.ndim), output=labels)
    return int(labels.max())


def count(question: str, ink: np.ndarray) -> str:
    """Answer a question by counting in the pixels."""
    if "rows" in question:
        inside = ink[:, np.flatnonzero(ink.any(axis=0))]
        return str(num_components(inside.mean(axis=1) > SOLID) - 1)
    return str(num_components(ink)) if "squares" in question else {1: "Yes", 2: "No"}[num_components(ink)]


@pytest.mark.parametrize("split", SPLITS)
def test_pixels_show_the_answer(built: Path, split: str) -> None:
    found = rows_of(built, split)
    assert len(found) == (NUM_TRAIN if split == "train" else NUM_EVAL)
    assert [count(question, ink_of(built / image)) for question, _, image in found] == [answer for _, answer, _ in found]


def test_answers_are_equally_frequent_and_the_count_shift_has_others(built: Path) -> None:
    for split in SPLITS:
        answers = collections.Counter((question, answer) for question, answer, _ in rows_of(built, split))
        if split == "shift_count":
            assert {answer for _, answer in answers} == {"5"} and set(answers.values()) == {NUM_EVAL // 2}
            continue
        total = len(rows_of(built, split)) // 3
        assert sorted(answers.values()) == sorted([total // 3] * 6 + [total // 2] * 2)


def colors_of(path: Path) -> set[tuple[int, ...]]:
    """Return the colors of all fully covered pixels: those that equal their four neighbors."""
    with Image.open(path) as picture:
        pixels = np.asarray(picture).astype(int)
    inner = pixels[1:-1, 1:-1]
    same = [(inner == pixels[1 + dy : SIDE - 1 + dy, 1 + dx : SIDE - 1 + dx]).all(axis=2) for dy, dx in ((0, 1), (0, -1))]
    return {tuple(color) for color in inner[same[0] & same[1]].tolist()} - {(255, 255, 255)}


def test_shifts_differ_from_training_in_one_property(built: Path) -> None:
    """Colors are read from the pixels of pictures with one color; styles differ in one field, and
    its ranges do not overlap.
    """
    seen = {
        split: set().union(*(colors_of(built / image) for question, _, image in rows_of(built, split) if "circles" not in question))
        for split in SPLITS
    }
    assert seen["train"] == seen["eval"] == seen["shift_size"] and len(seen["train"]) >= 4
    assert not seen["train"] & seen["shift_color"]
    names = {"color": "colors", "width": "widths", "size": "sizes"}
    for shift, style in SHIFTS.items():
        for name in names.values():
            ours, theirs = getattr(TRAINED, name), getattr(style, name)
            assert (ours == theirs) == (name != names[shift])
    assert SHIFTS["width"].widths[0] > TRAINED.widths[1] and SHIFTS["size"].sizes[1] < TRAINED.sizes[0]


def test_the_reader_and_the_rule_accept_the_answer_and_no_other(built: Path) -> None:
    """The recipe's settings read the data. A row's own answer has the reward 1, and every other
    answer of its kind 0."""
    recipe = settings_of(
        "experiment=geometry_grpo_cpu", f"task.data.train=[{built / 'train.jsonl'}]", f"task.data.eval=[{built / 'eval.jsonl'}]"
    )
    task = VqaTask(recipe.task)
    by_question = {question_of(name): kind for name, kind in KINDS.items()}

    async def scores(split: str) -> list[tuple[bool, float]]:
        found = []
        for example in task.examples(split):
            asked = str(example.payload["question"])
            kind = next(kind for question, kind in by_question.items() if question in asked)
            for answer in (*kind.answers, *kind.unseen_answers):
                turn = Turn(0, (0, 1), f"<answer>{answer}</answer>")
                reward = (await task.rubric.score(make_reward_input(turn, payload=example.payload))).reward
                found.append((answer == example.payload["answer"], reward))
        return found

    for split, num in (("train", NUM_TRAIN), ("eval", NUM_EVAL)):
        found = asyncio.run(scores(split))
        assert sum(is_right for is_right, _ in found) == num and all(reward == float(is_right) for is_right, reward in found)
        assert {image.open().size for example in task.examples(split) for image in example.payload["images"]} == {(SIDE, SIDE)}


def question_of(name: str) -> str:
    """Return the question of a kind."""
    ((_, _, scene),) = make_scenes("train", num=1, seed=0, kinds=[name])
    return scene.question


def test_the_benchmark_reader_names_the_kinds(built: Path) -> None:
    data = DataSettings(train=[str(built / "train.jsonl")], eval=[str(built / "shift_size.jsonl")], benchmark="vlmblind")
    examples = VqaTask(TaskSettings(name="vqa", data=data)).examples("eval")
    labels = collections.Counter(example.payload["official"]["labels"]["task"] for example in examples)
    assert labels == {f"{kind.task}, size": NUM_EVAL // 3 for kind in KINDS.values()}


def test_the_same_seed_writes_the_same_bytes_and_splits_share_no_picture(built: Path, tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path / "again"), "--num-train", str(NUM_TRAIN), "--num-eval", str(NUM_EVAL), "--seed", "5"]) == 0
    written = {path.relative_to(built): path.read_bytes() for path in built.rglob("*") if path.is_file()}
    assert written == {
        path.relative_to(tmp_path / "again"): path.read_bytes() for path in (tmp_path / "again").rglob("*") if path.is_file()
    }
    pictures = [content for path, content in written.items() if path.suffix == ".png"]
    assert len(pictures) == len(set(pictures)) == NUM_TRAIN + 5 * NUM_EVAL
    assert main(["--out", str(tmp_path / "other"), "--num-train", "3", "--num-eval", "3", "--seed", "6"]) == 0
    assert (tmp_path / "other/images/train_00000.png").read_bytes() not in pictures


def test_a_shorter_data_set_is_the_start_of_a_longer_one(built: Path, tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path / "few"), "--num-train", "7", "--num-eval", "3", "--seed", "5"]) == 0
    assert rows_of(tmp_path / "few", "train") == rows_of(built, "train")[:7]
    assert all((tmp_path / "few" / image).read_bytes() == (built / image).read_bytes() for _, _, image in rows_of(built, "train")[:7])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--side", "100"), "--side=100: must be a multiple of 28"),
        (("--num-eval", "0"), "--num-eval=0: must be at least 1"),
        (("--kinds", "grid", "star"), "--kinds=star: must be one of grid, nested_squares, touching_circles"),
        (("--kinds", "grid", "grid"), "--kinds=['grid', 'grid']: must name each kind at most once"),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], error: str) -> None:
    assert main(["--out", str(tmp_path / "out"), *arguments]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {error}") and said.count("\n") == 1 and not list(tmp_path.iterdir())


def test_an_existing_folder_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("x")
    assert main(["--out", str(tmp_path)]) == 1
    assert "exists; choose another folder" in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["mine"]
