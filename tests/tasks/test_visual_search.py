"""Tests visual search: the drawn canvases, what is visible in them, the rewards of demonstrations
and gold responses, and the files of the builder."""

import asyncio
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.Image import Image as Picture

from megatron_rl.config import TaskSettings
from megatron_rl.data.questions import load_questions
from megatron_rl.tasks.visual_python.tool_protocol import CodeAction, FinalAnswer
from megatron_rl.tasks.visual_search.drawing import LABELS, SEARCH_LEVELS, SHAPES, Box, SearchScene, draw_shapes, make_scene
from megatron_rl.tasks.visual_search.task import (
    DISC_SPRITES,
    GUESS_PROBABILITY,
    NANO_LEVEL,
    NUM_EVAL,
    SearchCanvas,
    VisualSearchTask,
    crop_box,
    write_crop_code,
)
from megatron_rl.types import StopReason, ToolCall, Turn
from megatron_rl_tools.data.make_visual_search import make_dataset, split_sprites
from tests.support.rollout_factory import make_reward_input

SPRITES = draw_shapes(SHAPES)


def task(reward: str = "pyvision") -> VisualSearchTask:
    return VisualSearchTask(TaskSettings(name="visual_search", reward=reward))


class Recorded:
    """An image that records its crops."""

    def __init__(self, picture: Picture, crops: list[Picture]) -> None:
        self.picture, self.crops = picture, crops

    def crop(self, box: Box) -> None:
        self.crops.append(self.picture.crop(box))


def label_of(crop: Picture, box: Box, places: SearchScene) -> str:
    """Return the label in a crop, by comparison with the same crop of canvases that differ only in
    the label of the target."""
    differences = {}
    for label in LABELS:
        other = SearchScene(places.level, (replace(places.target, label=label), *places.objects[1:]))
        drawn = np.asarray(other.draw(SPRITES).crop(box), np.int16)
        differences[label] = np.abs(drawn - np.asarray(crop, np.int16)).sum()
    return min(differences, key=differences.__getitem__)


@pytest.mark.parametrize("name", SEARCH_LEVELS)
def test_things_lie_in_cells_of_their_own_and_look_as_they_are_called(name: str) -> None:
    """Each object lies in its own cell and has the color of its sprite. Nothing is drawn outside
    the cells."""
    level = SEARCH_LEVELS[name]
    drawn = make_scene(level, list(SPRITES), seed="7")
    picture = drawn.draw(SPRITES)
    assert picture.size == (level.canvas_px, level.canvas_px)
    assert len({thing.cell for thing in drawn.objects}) == len({thing.name for thing in drawn.objects}) == level.num_objects
    bare = np.asarray(SearchScene(level, ()).draw(SPRITES))
    changed = (np.asarray(picture) != bare).any(axis=2)
    for thing in drawn.objects:
        left, top, right, bottom = thing.cell
        assert changed[top:bottom, left:right].any()
        changed[top:bottom, left:right] = False
        half = round(level.object_scale * level.cell_px) // 2
        # Every shape has its color near the lower edge: disc and diamond in the middle of the
        # edge, square and triangle everywhere on it.
        color = picture.getpixel((thing.center[0], thing.center[1] + round(0.75 * half)))
        expected = SPRITES[thing.name].getpixel((128, 128))
        assert np.abs(np.subtract(color, expected[:3])).max() <= 3, thing
    assert not changed.any(), "something was drawn outside of the things' cells"


def test_the_gold_crop_shows_the_label_and_the_whole_canvas_does_not() -> None:
    """The label can be read from the gold crop, where it is at least 20 rows high at 140 x 140
    pixels. At that size, in which the policy first receives the whole canvas, it is at most 3 rows
    high."""
    for example in task().examples("eval")[:8]:
        places = SearchCanvas(example.id).scene
        box = crop_box(places.target.cell)
        assert label_of(SearchCanvas(example.id).open().crop(box), box, places) == example.payload["answer"]

    def label_height(picture: Picture, x: int, y: int) -> int:
        """Return the number of rows around the middle of the label that contain a pixel darker than
        half, at 140 x 140 pixels for the whole image."""
        size = (140, 140)
        scale, reach = 140 / picture.width, 0.8 * NANO_LEVEL.label_scale * NANO_LEVEL.cell_px
        window = tuple(round(side * scale) for side in (x - reach, y - reach, x + reach, y + reach))
        small = np.asarray(picture.resize(size, Image.Resampling.BICUBIC).convert("L").crop(window))
        return int((small.min(axis=1) < 128).sum())

    target = make_scene(NANO_LEVEL, list(DISC_SPRITES), seed="1").target
    (x, y), box = target.center, crop_box(target.cell)
    picture = SearchScene(NANO_LEVEL, (target,)).draw(DISC_SPRITES)
    assert label_height(picture, x, y) <= 3
    assert label_height(picture.crop(box), x - box[0], y - box[1]) >= 20


def test_the_same_seed_draws_the_same_and_splits_share_no_canvas() -> None:
    """A seed always draws the same canvas, and training, evaluation and demonstrations share
    none."""
    examples = {split: task().examples(split) for split in ("train", "eval")}
    assert len(examples["eval"]) == NUM_EVAL
    first = examples["eval"][0].payload["images"][0].open()
    assert first.tobytes() == task().examples("eval")[0].payload["images"][0].open().tobytes()
    layouts = {split: {SearchCanvas(example.id).scene for example in some} for split, some in examples.items()}
    assert not layouts["train"] & layouts["eval"]
    assert len(layouts["eval"]) == NUM_EVAL
    assert len(layouts["train"]) == len(examples["train"])
    demonstrations = task().demonstrations("correct", num=20, seed=1)
    shown = {demonstration.messages[1]["content"][1]["image"].tobytes() for demonstration in demonstrations}
    assert len(shown) == 20
    assert not shown & {example.payload["images"][0].open().tobytes() for example in examples["eval"][:40]}


def test_gold_earns_full_marks_and_a_guess_none() -> None:
    for reward, full in (("accuracy", 1.0), ("pyvision", 1.1)):
        made = task(reward)
        for example in made.examples("eval")[:10]:
            code, answer = made.gold_replies(example)
            assert made.protocol.parse_reply(code) == CodeAction(write_crop_code(SearchCanvas(example.id).scene.target.cell))
            assert made.protocol.parse_reply(answer) == FinalAnswer(str(example.payload["answer"]))
            ran = Turn(sequence=0, token_span=(0, 1), text=code, tool_call=ToolCall(tool="python", source=code, ran=True))
            told = Turn(sequence=0, token_span=(1, 2), text=answer)
            gold = asyncio.run(made.rubric.score(make_reward_input(ran, told, payload=example.payload)))
            assert gold.reward == pytest.approx(full)
            wrong = made.protocol.write_answer(str(9 - int(str(example.payload["answer"]))))
            guess = Turn(sequence=0, token_span=(0, 1), text=wrong)
            for turns, end in (
                ([guess], StopReason.DONE),
                ([ran, guess], StopReason.DONE),
                ([ran], StopReason.MAX_TURNS),
                ([ran, ran], StopReason.MAX_TURNS),
            ):
                score = asyncio.run(made.rubric.score(make_reward_input(*turns, payload=example.payload, stop_reason=end)))
                assert score.reward == 0.0


def test_demonstrations_look_and_read_or_guess_as_often_as_they_say() -> None:
    """Correct demonstrations contain the crop that their code makes. Biased ones guess with
    GUESS_PROBABILITY, within three standard deviations."""
    made = task()
    for shown in made.demonstrations("correct", num=6, seed=3):
        _, question, code, observed, answer = shown.messages
        picture = question["content"][1]["image"]
        read = made.protocol.parse_reply(code["content"][0]["text"])
        assert isinstance(read, CodeAction)
        crops: list[Picture] = []
        exec(read.source.replace(".show()", ""), {"image_clue_0": Recorded(picture, crops)})
        (crop,) = [part["image"] for part in observed["content"] if part["type"] == "image"]
        assert [crop.tobytes()] == [taken.tobytes() for taken in crops]
        assert answer["role"] == "assistant"
    biased = list(made.demonstrations("biased", num=200, seed=3))
    guesses = [shown for shown in biased if len(shown.messages) == 3]
    assert len(guesses) / 200 == pytest.approx(GUESS_PROBABILITY, abs=0.102)  # three standard deviations
    assert {str(shown.messages[2]["content"][0]["text"]) for shown in guesses} == {made.protocol.write_answer(label) for label in LABELS}
    again = made.demonstrations("biased", num=50, seed=3)
    assert [len(shown.messages) for shown in again] == [len(shown.messages) for shown in biased[:50]]


@pytest.mark.parametrize("parquet", [False, True])
def test_the_builders_files_are_read_by_the_data_room(tmp_path: Path, parquet: bool) -> None:
    """The dataset reader reads the builder's files. The same seed gives the same images, and each
    answer is the label in the target's box."""
    chosen = {"level": "medium", "things": "shapes", "source": None, "num_train": 5, "num_eval": 3, "parquet": parquet}
    make_dataset(tmp_path / "a", seed=0, **chosen)
    make_dataset(tmp_path / "b", seed=0, **chosen)
    make_dataset(tmp_path / "c", seed=1, **chosen)
    suffix = "parquet" if parquet else "jsonl"
    read = {folder: load_questions([str(tmp_path / folder / f"train.{suffix}")], images_root="", name="train") for folder in "abc"}
    held_out = load_questions([str(tmp_path / "a" / f"eval.{suffix}")], images_root="", name="eval")
    assert [len(rows) for rows in read.values()] == [5, 5, 5]
    assert len(held_out) == 3
    pictures = {folder: [rows[index].payload["images"][0].open().tobytes() for index in range(5)] for folder, rows in read.items()}
    assert pictures["a"] == pictures["b"]
    assert not set(pictures["a"]) & {*pictures["c"], *(held_out[index].payload["images"][0].open().tobytes() for index in range(3))}
    for index in range(5):
        payload = read["a"][index].payload
        target, *others = payload["extra"]["things"]
        assert payload["question"] == f"<image>\nWhat is written on the {target['name']}?"
        assert target["bbox"] == payload["extra"]["bbox"]
        assert target["label"] == payload["answer"]
        assert len(others) == SEARCH_LEVELS["medium"].num_objects - 1
        places = make_scene(SEARCH_LEVELS["medium"], sorted(SPRITES), seed=f"train 0 {index}")
        box = tuple(target["bbox"])
        assert label_of(payload["images"][0].open().crop(box), box, places) == payload["answer"]


def test_pictured_things_of_the_eval_split_are_new(tmp_path: Path) -> None:
    """The splits for training and evaluation share no sprite. The source is a small npm package
    with 20 animals, one that looks like the first, a sequence, and a code point without a name."""
    path = tmp_path / "package.tgz"
    with tarfile.open(path, "w:gz") as package:
        stems = [*(f"{0x1F400 + index:x}" for index in range(20)), "1f415-200d-1f9ba", "e000", "1f43f-fe0f"]
        for number, stem in zip([*range(22), 0], stems, strict=True):
            picture = Image.new("RGBA", (32, 32))
            picture.paste((number * 10, 100, 200 - number, 255), (8, 8, 24, 20))
            content = io.BytesIO()
            picture.save(content, format="WEBP", lossless=True)
            member = tarfile.TarInfo(f"package/assets/{stem}.webp")
            member.size = len(content.getvalue())
            package.addfile(member, io.BytesIO(content.getvalue()))
    splits = split_sprites("fluent", source=path)
    assert not splits["train"].keys() & splits["eval"].keys()
    assert len(splits["train"]) + len(splits["eval"]) == 20
    assert {"rat", "rooster"} <= splits["train"].keys() | splits["eval"].keys()
    assert all(picture.size == (16, 16) for picture in splits["train"].values()), "not cut to what is seen"


def test_bad_arguments_name_their_remedy(tmp_path: Path) -> None:
    chosen = {"level": "easy", "things": "shapes", "source": None, "num_train": 1, "num_eval": 1, "seed": 0, "parquet": False}
    changes = [({"level": "x"}, "--level"), ({"things": "x"}, "--things"), ({"things": "noto"}, "--source"), ({"num_eval": 0}, "--num")]
    for change, key in changes:
        with pytest.raises(ValueError, match=key):
            make_dataset(tmp_path / "out", **chosen | change)
        assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="--out"):
        make_dataset(tmp_path / "out", **chosen)
    with pytest.raises(ValueError, match="protocol"):
        VisualSearchTask(TaskSettings(name="visual_search", tool_format="deepeyes"))
    with pytest.raises(ValueError, match="available object names"):
        make_scene(SEARCH_LEVELS["hard"], list(DISC_SPRITES), seed="0")
