"""Tests the readers of published benchmarks with small files of the same format: the question, the
reference answer, and the unit that is scored together.
"""

import base64
import json
import re
import tempfile
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl.config import DataSettings
from megatron_rl.config.rollout import BENCHMARKS as NAMES
from megatron_rl.data.benchmarks.catalog import BENCHMARKS, load_benchmark_questions
from megatron_rl.data.benchmarks.items import BenchmarkItem, sample_evenly, shuffle_options
from megatron_rl.data.rows import open_rows
from tests.support.data_files import make_png

RED, BLUE = base64.b64encode(make_png("red")).decode(), base64.b64encode(make_png("blue")).decode()
PICTURE = {"bytes": make_png("red"), "path": "x.png"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write Arrow copies to a folder of the test."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cache"))


def payloads(benchmark: str, *paths: Path, **data: object) -> list[dict]:
    given = DataSettings(eval=[str(path) for path in paths], benchmark=benchmark, **data)
    return [dict(example.payload) for example in load_benchmark_questions(given, "eval")]


def colors(payload: dict) -> list[tuple[int, int, int]]:
    return [image.open().getpixel((0, 0)) for image in payload["images"]]


def parquet(path: Path, rows: list[dict]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_names_are_those_of_the_setting() -> None:
    assert list(NAMES) == list(BENCHMARKS)
    with pytest.raises(ValueError, match="^task.data.benchmark=gqa"):
        DataSettings(benchmark="gqa")
    with pytest.raises(ValueError, match="^task.data.shuffle_options=3: requires a published benchmark"):
        DataSettings(shuffle_options=3)


def test_vstar_as_its_folders_have_it(tmp_path: Path) -> None:
    """V* as a folder with a JSON file for each image, on one line or on several. The first option
    is the correct one.
    """
    said = {"target_object": ["glove"], "bbox": [[10, 3, 5, 5]], "question": "Which color?", "options": ["red", "blue", "green"]}
    for folder, name, indent in (("direct_attributes", "a", None), ("relative_position", "b", 2)):
        (tmp_path / "v" / folder).mkdir(parents=True)
        (tmp_path / "v" / folder / f"{name}.jpg").write_bytes(make_png("red"))
        (tmp_path / "v" / folder / f"{name}.json").write_text(json.dumps(said, indent=indent))
    one, two = payloads("vstar", tmp_path / "v")
    assert one["question"] == "<image>\nWhich color?\nA. red\nB. blue\nC. green" and one["answer"] == "A" and colors(one) == [(255, 0, 0)]
    assert [each["official"]["labels"] for each in (one, two)] == [{"category": "direct_attributes"}, {"category": "relative_position"}]
    (tmp_path / "v" / "relative_position" / "b.jpg").unlink()
    with pytest.raises(ValueError, match=r"b.json row 0: image: no such image .*relative_position/b.jpg"):
        payloads("vstar", tmp_path / "v")


def test_vstar_as_lines(tmp_path: Path) -> None:
    (tmp_path / "direct_attributes").mkdir()
    (tmp_path / "direct_attributes" / "sa_1.jpg").write_bytes(make_png("blue"))
    text = "Which color has it?\n(A) red\n(B) light blue\nAnswer with a letter."
    row = {"image": "direct_attributes/sa_1.jpg", "text": text, "category": "direct_attributes", "label": "B", "question_id": 3}
    (found,) = payloads("vstar", lines(tmp_path / "test_questions.jsonl", [row]))
    assert found["question"] == "<image>\nWhich color has it?\nA. red\nB. light blue"
    assert found["answer"] == "B" and colors(found) == [(0, 0, 255)]


def test_hrbench_as_a_table(tmp_path: Path) -> None:
    """A table with four option orders of one question. An image that an earlier row contains is
    given as the index of that row.
    """
    options = ["0.1", "x\ty", 'a "b"', "d"]
    rows = [
        {"index": 7 + turn, "question": "How\nmany?", **dict(zip("ABCD", options[turn:] + options[:turn], strict=True)),
         "answer": "ADCB"[turn], "category": "single", "cycle_category": turn, "image": RED if turn == 0 else "7"}
        for turn in range(4)
    ]  # fmt: skip
    rows.append({**rows[0], "index": 11, "image": BLUE})
    pd.DataFrame(rows).to_csv(tmp_path / "hr_bench_4k.tsv", sep="\t", index=False)
    found = payloads("hrbench", tmp_path / "hr_bench_4k.tsv")
    *found, other = found
    assert [colors(each) for each in found] == [[(255, 0, 0)]] * 4 and colors(other) == [(0, 0, 255)]
    assert other["official"]["unit"] != found[0]["official"]["unit"], "the same question about another picture is another one"
    assert found[1]["question"] == '<image>\nHow\nmany?\nA. x\ty\nB. a "b"\nC. d\nD. 0.1'
    assert {each["official"]["options"]["ABCD".index(each["answer"])] for each in found} == {"0.1"}, "the same option in each order"
    assert [each["official"]["labels"]["cycle"] for each in found] == ["0", "1", "2", "3"]
    assert len({each["official"]["unit"] for each in found}) == 1


def test_mathverse(tmp_path: Path) -> None:
    """The last problem version has its question in the image."""
    row = {"sample_index": "1", "problem_index": "9", "image": PICTURE, "answer": "B", "question_type": "multi-choice"}
    words = ["Find x.\nChoices:\nA:1\nB:2", ""]
    versions = [{**row, "question": words[n], "problem_version": ("Text Dominant", "Vision Only")[n]} for n in range(2)]
    one, two = payloads("mathverse", parquet(tmp_path / "testmini.parquet", versions))
    assert one["question"] == "<image>\nFind x.\nChoices:\nA:1\nB:2" and "picture" in two["question"]
    assert [each["official"]["unit"] for each in (one, two)] == ["9", "9"]


def test_mathvista(tmp_path: Path) -> None:
    """A multiple-choice row whose answer is an option's text, and a decimal with its unit and
    precision.
    """
    about = {"task": "figure question answering", "context": "x", "skills": ["a"]}
    rows = [
        {"pid": "1", "question": "Which?", "image": "images/1.jpg", "decoded_image": PICTURE, "choices": ["yes", "no"], "unit": None,
         "precision": None, "answer": "no", "question_type": "multi_choice", "answer_type": "text", "metadata": about},
        {"pid": "2", "question": "How long?", "image": "images/1.jpg", "decoded_image": PICTURE, "choices": None, "unit": "cm",
         "precision": 1.0, "answer": "1.2", "question_type": "free_form", "answer_type": "float", "metadata": about},
    ]  # fmt: skip
    one, two = payloads("mathvista", parquet(tmp_path / "testmini.parquet", rows))
    assert (one["question"], one["answer"]) == ("<image>\nWhich?\nA. yes\nB. no", "B")
    assert (two["question"], two["answer"]) == ("<image>\nHow long? (Unit: cm)\nGive a number with 1 decimals.", "1.2")
    assert two["official"]["labels"] == {"task": "figure question answering", "type": "float"} and two["official"]["precision"] == 1


def test_vsi_bench_shows_frames(tmp_path: Path) -> None:
    """The requested number of frames is shown, evenly spaced and in order."""
    scene = tmp_path / "arkit" / "41"
    scene.mkdir(parents=True)
    for number in range(5):
        (scene / f"{number:05d}.png").write_bytes(make_png((0, 0, 50 * number)))
    row = {"id": 1, "dataset": "arkit", "scene_name": "41"}
    rows = [
        {**row, "question_type": "object_counting", "question": "How many?", "ground_truth": "4"},
        {**row, "question_type": "route_planning", "question": "Where?", "options": ["A. left", "B. right"], "ground_truth": "B"},
    ]
    path = lines(tmp_path / "test.jsonl", rows)
    count, route = payloads("vsi_bench", path, frames=3)
    assert [color[2] for color in colors(count)] == [0, 100, 200]
    assert count["question"].endswith("How many?\nGive a number.") and route["question"].endswith("Where?\nA. left\nB. right")
    assert (count["answer"], route["answer"]) == ("4", "B")
    path.write_text(path.read_text().replace("41", "42"))
    with pytest.raises(ValueError, match=r"test.jsonl row 0: scene_name: no frames in .*arkit/42, and no 42.mp4 next to it; ffmpeg -i"):
        payloads("vsi_bench", path)


def test_vsi_bench_has_videos_for_code(tmp_path: Path) -> None:
    """A scene without frames provides its video to code. A task that shows images refuses the row
    and names the remedy.
    """
    (tmp_path / "arkit").mkdir()
    (tmp_path / "arkit" / "41.mp4").write_bytes(b"\0\0\0\x18ftypisom")
    row = {
        "id": 1,
        "dataset": "arkit",
        "scene_name": "41",
        "question_type": "object_counting",
        "question": "How many?",
        "ground_truth": "4",
    }
    given = DataSettings(eval=[str(lines(tmp_path / "test.jsonl", [row]))], benchmark="vsi_bench")
    (found,) = (example.payload for example in load_benchmark_questions(given, "eval", videos=True))
    assert [clip.source for clip in found["videos"]] == [tmp_path / "arkit" / "41.mp4"] and found["images"] == ()
    assert found["question"] == "How many?\nGive a number."
    with pytest.raises(ValueError, match=r"^task.data.eval=.*test.jsonl row 0 contains a video, which is available only to the code of"):
        load_benchmark_questions(given, "eval")


def test_tir_bench(tmp_path: Path) -> None:
    """The file is a JSON list. Rows have one or two images, and an answer that the official scoring
    corrects is corrected here, too.
    """
    (tmp_path / "images").mkdir()
    for name in ("1.png", "2.png", "60.jpg"):
        (tmp_path / "images" / name).write_bytes(make_png("red"))
    rows = [
        {"id": 0, "task": "spot_difference", "image_1": "images/1.png", "image_2": "images/2.png", "prompt": "Where?", "answer": "1, 3"},
        {"id": 1, "task": "jigsaw", "image_1": "images/1.png", "image_2": None, "prompt": "Order?", "answer": "2 1 4 3",
         "meta_data": {"difficulty": 2}},
        {"id": 2, "task": "ocr", "image_1": "images/60.jpg", "image_2": None, "prompt": "Read.", "answer": "mob"},
        {"id": 3, "task": "color", "image_1": "images/1.png", "image_2": None, "prompt": "Which?\nA. red\nB. blue", "answer": "A"},
    ]  # fmt: skip
    (tmp_path / "TIR-Bench.json").write_text(json.dumps(rows))
    spot, jigsaw, ocr, color = payloads("tir_bench", tmp_path / "TIR-Bench.json")
    assert [len(each["images"]) for each in (spot, jigsaw, ocr, color)] == [2, 1, 1, 1]
    assert jigsaw["official"]["side"] == 2 and ocr["answer"] == "mobi" and spot["official"]["labels"] == {"task": "spot_difference"}


def test_visualprobe(tmp_path: Path) -> None:
    """Image names begin with the name of the dataset, which also contains the level."""
    (tmp_path / "a.png").write_bytes(make_png("blue"))
    rows = [{"images": ["VisualProbe_Hard/a.png"], "problem": "<image>What?", "solution": "<answer>a cat</answer>"}]
    (tmp_path / "val.json").write_text(json.dumps(rows))
    (found,) = payloads("visualprobe", tmp_path / "val.json")
    assert (found["question"], found["answer"]) == ("<image>\nWhat?", "a cat") and colors(found) == [(0, 0, 255)]
    assert found["official"]["labels"] == {"level": "hard"}


def test_mathvision(tmp_path: Path) -> None:
    """A numbered image placeholder in the question is replaced. Options that are only letters are
    labels in the image and are never shuffled.
    """
    row = {"image": "images/1.jpg", "decoded_image": PICTURE, "level": 3, "subject": "counting"}
    rows = [
        {**row, "id": "1", "question": "Which?\n<image1>", "options": list("ABCDE"), "answer": "C"},
        {**row, "id": "2", "question": "How many in <image1>?", "options": [], "answer": "12"},
    ]
    path = parquet(tmp_path / "test.parquet", rows)
    for seed in (0, 5):
        one, two = payloads("mathvision", path, shuffle_options=seed)
        assert (one["question"], one["answer"]) == ("Which?\n<image>\nA. A\nB. B\nC. C\nD. D\nE. E", "C")
        assert (two["question"], two["answer"]) == ("How many in <image>?", "12")
        assert one["official"]["labels"] == {"subject": "counting", "level": "3"}


def test_wemath(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(make_png("red"))
    row = {"ID": 4, "split": "testmini", "image_path": "1.png", "question": "x?", "answer": "B"}
    rows = [{**row, "key": key, "option": "A. 1; 2 cm; B. 3 cm; C. No correct answer"} for key in ("2steps_1", "2steps_2", "2steps_multi")]
    (tmp_path / "testmini.json").write_text(json.dumps(rows))
    found = payloads("wemath", tmp_path / "testmini.json")
    assert found[0]["official"]["options"] == ("1; 2 cm", "3 cm", "No correct answer")
    assert {each["official"]["unit"] for each in found} == {"2 4"}
    rows[1]["key"] = "9steps_1"
    (tmp_path / "testmini.json").write_text(json.dumps(rows))
    with pytest.raises(ValueError, match="testmini.json row 1: key: is 9steps_1"):
        payloads("wemath", tmp_path / "testmini.json")


def test_dynamath(tmp_path: Path) -> None:
    """The dataset is given as files of variants or as a table."""
    about = {"answer_type": "float", "subject": "algebra", "knowledge_level": "high school"}
    row = {"id": "5", "question": "What?", "decoded_image": PICTURE, **about}
    for variant in (1, 2):
        parquet(tmp_path / f"sample_variant{variant}-00000-of-00001.parquet", [{**row, "ground_truth": f"{variant}.5"}])
    table = {"index": 0, "qid": 5, "varid": 1, "question": "What?", "image": BLUE, "answer": 1.5, **about}
    pd.DataFrame([table]).to_csv(tmp_path / "d.tsv", sep="\t", index=False)
    files = payloads("dynamath", *sorted(tmp_path.glob("*.parquet")))
    (one,) = payloads("dynamath", tmp_path / "d.tsv")
    assert [each["answer"] for each in files] == ["1.5", "2.5"] and {each["official"]["unit"] for each in (*files, one)} == {"5"}
    assert one["question"] == files[0]["question"] and colors(one) == [(0, 0, 255)]


def test_vlmblind(tmp_path: Path) -> None:
    row = {"image": PICTURE, "prompt": "Count. Answer like {3}.", "groundtruth": "4", "metadata": "{}"}
    rows = [{**row, "task": f"Olympic Counting - {shapes}"} for shapes in ("Circles", "Pentagons")]
    found = payloads("vlmblind", parquet(tmp_path / "valid-0.parquet", rows))
    assert {each["official"]["labels"]["task"] for each in found} == {"Olympic Counting"} and found[0]["answer"] == "4"


@pytest.mark.parametrize("benchmark", NAMES)
def test_rows_of_something_else_are_one_line(benchmark: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "mine.jsonl", [{"something": "else"}])
    with pytest.raises(
        ValueError, match=r"^mine.jsonl row 0: \w+: is missing; the row has the columns something$|^mine.jsonl row 0: \w+: "
    ):
        payloads(benchmark, path)


def test_options_are_shuffled_by_seed_and_place() -> None:
    """Shuffling keeps the answer on the correct option, puts the correct option at every position,
    and depends on the seed.
    """
    item = BenchmarkItem(question="?", answer="A", options=("right", "b", "c", "d"))
    places = [shuffle_options(item, row_id=str(number), seed=1) for number in range(200)]
    assert all(options["ABCD".index(answer)] == "right" and sorted(options) == ["b", "c", "d", "right"] for options, answer in places)
    assert {answer for _, answer in places} == set("ABCD")
    assert places == [shuffle_options(item, row_id=str(number), seed=1) for number in range(200)]
    assert places != [shuffle_options(item, row_id=str(number), seed=2) for number in range(200)]
    assert shuffle_options(item, row_id="0", seed=0) == (item.options, "A")


def test_frames_are_spread_evenly() -> None:
    assert (
        sample_evenly(list(range(9)), max_num=3) == [0, 4, 8]
        and sample_evenly([1, 2], max_num=32) == [1, 2]
        and sample_evenly([1, 2, 3], max_num=1) == [1]
    )


def numbered(path: Path, rows: dict) -> Path:
    path.write_text(json.dumps(rows, indent=4))
    return path


def test_mathvista_as_its_repository_has_it(tmp_path: Path) -> None:
    """data/testmini.json is one object with a key per row and images next to the file. The rows are
    read in the order of the keys, also if the file is a single line.
    """
    (tmp_path / "images").mkdir()
    for name, color in (("2", "red"), ("10", "blue")):
        (tmp_path / "images" / f"{name}.jpg").write_bytes(make_png(color))
    about = {"task": "geometry problem solving", "skills": ["a"]}
    free = {"question": "How many?", "image": "images/10.jpg", "choices": None, "unit": None, "precision": None, "answer": "-3"}
    free |= {"question_type": "free_form", "answer_type": "integer", "pid": "10", "metadata": about}
    chosen = {**free, "image": "images/2.jpg", "choices": ["B", "A"], "answer": "A", "question_type": "multi_choice", "pid": "2"}
    path = numbered(tmp_path / "testmini.json", {"10": free, "2": chosen})
    for text in (path.read_text(), json.dumps({"10": free, "2": chosen})):
        path.write_text(text)
        one, two = payloads("mathvista", path)
        assert (one["answer"], two["answer"]) == ("B", "-3") and [colors(each) for each in (one, two)] == [[(255, 0, 0)], [(0, 0, 255)]]
    numbered(path, {"1": {**free, "answer": ""}})
    with pytest.raises(ValueError, match="testmini.json row 0: answer: is empty: answers of MathVista's test split are not published"):
        payloads("mathvista", path)


def test_dynamath_as_its_repository_has_it(tmp_path: Path) -> None:
    """DynaMath's repository has ten trials of dataset.json, of which the test has two. Variants of
    a problem share its number, and the options are part of the question.
    """
    question = "Is it red? choice: (A) Yes (B) No"
    row = {"question": question, "answer": "B", "image": "image/image1.png", "answer_type": "multiple choice", "subject": "statistics"}
    rows = {"2": {**row, "level": "high school"}, "1": {**row, "level": "elementary school"}}
    for trial in (1, 2):
        (tmp_path / f"trial{trial}" / "image").mkdir(parents=True)
        (tmp_path / f"trial{trial}" / "image" / "image1.png").write_bytes(make_png("red"))
        numbered(tmp_path / f"trial{trial}" / "dataset.json", rows)
    found = payloads("dynamath", *sorted(tmp_path.glob("trial*/dataset.json")))
    assert [each["official"]["unit"] for each in found] == ["1", "2", "1", "2"] and {each["answer"] for each in found} == {"B"}
    assert [each["official"]["labels"]["level"] for each in found[:2]] == ["elementary school", "high school"]
    assert found[0]["official"]["choices"] == ("Yes", "No") and colors(found[0]) == [(255, 0, 0)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"1": {"a": 1}, "x": {}}', 'the key "x" is not a whole number'),
        ('{"1": {"a": 1}, "-2": {}}', 'the key "-2" is not a whole number'),
        ('{"1": "Hint: ...", "2": "Hint: ..."}', "the value of the key 1 is not an object"),
        ('{"1": {}, "2": [1]}', "the value of the key 2 is not an object"),
        ('{"1": {}, "01": {}}', "has the key 01 twice"),
        ('{"1": {"a": 1}, "2": {"a"', "is truncated or not valid JSON: byte 14"),
        ('{"1": {"a": 1}} {"2": {}}', "is truncated or not valid JSON: byte 14"),
    ],
)
def test_objects_by_number_of_another_kind_are_refused_by_name(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "query.json").write_text(text)
    with pytest.raises(ValueError, match=r"^task.data.eval=.*query.json: " + re.escape(reason)):
        payloads("mathvista", tmp_path / "query.json")


def test_an_object_by_number_may_be_larger_than_what_is_read_at_once(tmp_path: Path) -> None:
    """An object with rows of 400 KB, which span several blocks of 1 MB, is read as by the json
    module. A row with its own id keeps it.
    """
    rows = {str(number): {"text": "\u00e9}{" * 100_000 + str(number)} for number in (30, 4, 100)} | {"7": {"id": "own"}}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows, ensure_ascii=False))
    found = open_rows(path)
    assert list(found) == [{"id": "4", **rows["4"]}, {"id": "own"}, {"id": "30", **rows["30"]}, {"id": "100", **rows["100"]}]
    one = tmp_path / "one.json"
    one.write_text('{\n"question": "?", "answer": "1"}')
    assert list(open_rows(one)) == [{"question": "?", "answer": "1"}]
