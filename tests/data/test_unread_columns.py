"""Tests which columns of questions contain images, and the warnings about unread columns that
matter. Oracles: the colors of generated images, and messages by hand.
"""

import base64
import json
import re
import tempfile
from pathlib import Path

import datasets
import pyarrow as pa
import pytest

from megatron_rl.config import ColumnSettings
from megatron_rl.data.media import find_media
from megatron_rl.data.questions import load_questions, open_questions
from megatron_rl.data.records import DataRecord
from megatron_rl.data.survey import QuestionSurvey, survey_questions
from megatron_rl.data.unread import parse_options
from tests.support.data_files import make_png, write_rows

COLORS = {(255, 0, 0): "red", (0, 0, 255): "blue", (0, 255, 0): "lime"}
ASKED = {"question": "What?", "answer": "B"}
BMP = b"BM\x7a\x02" + bytes(6) + b"\x36\0\0\0\x28\0\0\0" + bytes(99)
IN_BASE64 = base64.b64encode(make_png("red")).decode()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cache"))
    for color in ("red", "blue", "lime"):
        (tmp_path / f"{color}.png").write_bytes(make_png(color))
    (tmp_path / "clip.mp4").write_bytes(b"\0\0\0\x18ftypmp42")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "red").write_bytes(make_png("red"))


def look(tmp_path: Path, *rows: dict, name: str = "q.jsonl", columns: ColumnSettings | None = None) -> QuestionSurvey:
    path = write_rows(tmp_path / name, [ASKED | row for row in rows])
    return survey_questions(open_questions([str(path)], images_root="", name="train", columns=columns))


def colors(tmp_path: Path, row: dict) -> list[str]:
    path = write_rows(tmp_path / "q.jsonl", [ASKED | row])
    payload = load_questions([str(path)], images_root="", name="train")[0].payload
    assert payload["extra"] == {}
    return [COLORS[image.open().getpixel((0, 0))] for image in payload["images"]]


NAMES = [
    "image", "images", "image_path", "image_paths", "img", "imgs", "image_file", "file_name", "filename", "image_url", "image_urls",
    "picture", "pictures", "photo", "decoded_image", "image_0", "image_1", "img1", "photo_2", "Image", "IMAGES", "Image_Path", "File_Name",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_of_picture_columns(name: str, tmp_path: Path) -> None:
    assert colors(tmp_path, {name: "red.png"}) == ["red"] == colors(tmp_path, {name: ["red.png"]})


def test_pictures_as_bytes_and_lists_in_a_text(tmp_path: Path) -> None:
    assert colors(tmp_path, {"image_bytes": IN_BASE64}) == ["red"]
    for text in ('["red.png", "blue.png"]', "['red.png', 'blue.png']"):  # pandas writes the second form into tables
        assert colors(tmp_path, {"images": text}) == ["red", "blue"]


def test_numbered_columns_are_one_list_in_numeric_order(tmp_path: Path) -> None:
    names = ["blue.png", *["lime.png"] * 9, "red.png"]
    row = {f"image_{number}": names[number - 1] for number in (11, 10, 2, 1)} | {"image_3": None, "image_4": ""}
    assert colors(tmp_path, row) == ["blue", "lime", "lime", "red"]
    assert colors(tmp_path, {"image_0": "red.png", "image_1": ["blue.png", "lime.png"]}) == ["red", "blue", "lime"]


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"image": "red.png", "img": "blue.png"}, "image and img: each contain images; .* 'task.data.columns={images: image}'"),
        ({"image_0": "red.png", "img_0": "blue.png"}, "image_0 and img_0: each contain images"),
        ({"image": "red.png", "image_2": "blue.png"}, "image and image_2: each contain images"),
        ({"img": "no.png"}, "img: no such file .*no.png"),
        ({"image_url": "https://x.org/a.png"}, "image_url: https://x.org/a.png is a URL"),
    ],
)
def test_columns_that_contradict_each_other(row: dict, error: str, tmp_path: Path) -> None:
    (line,) = look(tmp_path, row).errors
    assert re.match(f"q.jsonl row 0: {error}", line), line


@pytest.mark.parametrize(
    "row",
    [
        {"image": "red.png", "image_url": "http://images.cocodataset.org/a.jpg"},
        {"image": {"bytes": IN_BASE64}, "image_path": "orig/a.png"},
        {"image": "images/1.jpg", "decoded_image": {"bytes": IN_BASE64}},
    ],
)
def test_where_a_picture_comes_from_is_no_second_picture(row: dict, tmp_path: Path) -> None:
    """A second column with the origin of the image is ignored, as in datasets with COCO images and
    in MathVista. Two columns that both name images are an error.
    """
    found = look(tmp_path, row)
    assert (found.errors, found.column_warnings, found.num_images) == ([], [], 1)
    (line,) = look(tmp_path, {"image": "no.png", "img": "nor.png"}).errors
    assert "image and img: each contain images" in line
    (line,) = look(tmp_path, {"image": "red.png", "images": ["nor.png"]}).errors
    assert "image and images: each contain images" in line


def test_a_name_that_tasks_read_is_no_picture_of_its_own(tmp_path: Path) -> None:
    """image_file_name names the row's images for the code of task=visual_python."""
    assert look(tmp_path, {"image": "red.png", "image_file_name": "blue.png"}).column_warnings == []
    (error,) = look(tmp_path, {"image_file_name": "blue.png"}).errors
    assert error.startswith("q.jsonl row 0: column image_file_name looks like paths of pictures that exist and is not read: ")


def test_a_column_that_is_chosen_among_several(tmp_path: Path) -> None:
    found = look(tmp_path, {"image": "red.png", "img": "no.png"}, columns=ColumnSettings(images="image"))
    assert (found.errors, found.num_images) == ([], 1)


CHOOSE = "'task.data.columns={images: shot}'"
MISSING = "names of pictures that do not exist and is not read: 'task.data.columns={images: shot}'; task.data.images is the folder"


@pytest.mark.known_failure("image-column-ignored")
@pytest.mark.parametrize(
    ("value", "looks"),
    [
        ("red.png", f"looks like paths of pictures that exist and is not read: {CHOOSE}"),
        (["red.png"], f"looks like paths of pictures that exist and is not read: {CHOOSE}"),
        ("bare/red", f"looks like paths of pictures that exist and is not read: {CHOOSE}"),
        ("no.png", f"looks like {MISSING}"),
        ({"path": "red.png"}, f"looks like paths of pictures that exist and is not read: {CHOOSE}"),
        ({"bytes": IN_BASE64}, f"contains pictures in base64 and is not read: {CHOOSE}"),
        (IN_BASE64, f"contains pictures in base64 and is not read: {CHOOSE}"),
        (base64.encodebytes(make_png("red")).decode(), "contains pictures in base64 and is not read"),
        (f"data:image/png;base64,{IN_BASE64}", "contains pictures as data: URLs and is not read"),
        (f"DATA:image/png;base64,{IN_BASE64}", "contains pictures as data: URLs and is not read"),
        ("https://x.org/a.JPG?w=3", "looks like web addresses of pictures and is not read: download them"),
        (list(make_png("red")), "contains the bytes of pictures as numbers and is not read"),
        (make_png("red").hex(), "contains pictures as hexadecimal digits and is not read"),
        ([[[0, 0, 255]] * 3] * 2, "looks like pixels, as lists of numbers and is not read"),
        ({"views": [{"front": "red.png"}]}, "looks like paths of pictures that exist and is not read"),
        ({"a": {"b": {"c": [{"d": {"e": ["red.png"]}}]}}}, "looks like paths of pictures that exist and is not read"),
        (repr(make_png("red")), "contains the Python representation of image bytes (b'...') and is not read"),
        (base64.b64encode(BMP).decode(), "contains pictures in base64 and is not read"),
        (["a word"] * 99 + ["red.png"], "looks like paths of pictures that exist and is not read"),
        ([{"content": [{"image_url": {"url": f"data:image/png;base64,{IN_BASE64}"}}]}], "contains pictures as data: URLs and is not read"),
        ('["red.png", "blue.png"]', f"looks like paths of pictures that exist and is not read: {CHOOSE}"),
        ("{'views': [{'front': 'red.png'}]}", "looks like paths of pictures that exist and is not read"),
        (json.dumps({"page": json.dumps([IN_BASE64])}), "contains pictures in base64 and is not read"),
        (make_png("red").decode("latin-1"), "contains the bytes of pictures as text and is not read"),
        (make_png("red").decode("utf-8", "replace"), "contains the bytes of pictures as text and is not read"),
        ((b"\xff\xd8\xff\xe0\0\x10JFIF\0" + bytes(99)).decode("utf-8", "ignore"), "contains the bytes of pictures as text and is not read"),
        (BMP.decode("latin-1"), "contains the bytes of pictures as text and is not read"),
        (repr(make_png("red"))[2:-1], "contains the Python representation of image bytes (b'...') and is not read"),
    ],
    ids=range(28),
)
def test_pictures_in_columns_of_other_names(value: object, looks: str, tmp_path: Path) -> None:
    """An unread column with images is an error if the row has no other image, and a warning
    otherwise. The message has the file and the number of rows.

    Names of files that do not exist, and web addresses, may say where the picture that is read comes from.
    """
    blind = look(tmp_path, *[{"shot": value}] * 3)
    (error,) = blind.errors
    assert error.startswith(f"q.jsonl: column shot {looks}"), error
    assert blind.num_errors == 3
    seen = look(tmp_path, *[{"shot": value, "image": "blue.png"}] * 3, {"image": "blue.png"})
    line = f"q.jsonl row 0: column shot {looks.split(' and is not')[0]} and is not read (3 of 4 rows): other images of the row are read"
    assert seen.errors == []
    is_there = "not exist" not in looks and "web addresses" not in looks
    assert [each[: len(line)] for each in seen.column_warnings] == ([line] if is_there else [])
    with pytest.raises(ValueError, match=r"^q.jsonl row 0: column shot "):
        load_questions([str(write_rows(tmp_path / "q.jsonl", [ASKED | {"shot": value}]))], images_root="", name="train")


@pytest.mark.parametrize(
    "value",
    [
        "a word", 3, True, 0.5, [1, 2], {"a": "b"}, "see a/b", "fig. no 3 of x.png is meant", [[1, 2, 3, 4]], "x" * 99,
        {"path": "geometry/triangles"}, "BM\nis a word", "BMP", "[1] a/b", "{not json}", "[3, 4]", '{"a": 1}', "JFIF\n",
        [[[1, 2, 3, 4], [2, 3, 4, 5]], [[1, 2, 3, 4]]], [[[1, 2], [3, 4]], [[5, 6], [7, 8]]],
    ],
)  # fmt: skip
def test_values_that_are_no_pictures(value: object, tmp_path: Path) -> None:
    found = look(tmp_path, {"shot": value, "image": "red.png"})
    assert (found.errors, found.column_warnings) == ([], [])
    assert look(tmp_path, {"shot": value}).errors == []


def test_the_same_picture_by_another_name(tmp_path: Path) -> None:
    """A second column with the name of the image that is read causes no warning."""
    found = look(tmp_path, {"image": "red.png", "file_name": "red.png", "source": "./red.png"})
    assert (found.errors, found.column_warnings, found.num_images) == ([], [], 1)
    other = look(tmp_path, {"image": "red.png", "file_name": "blue.png"})
    assert [line.partition(" looks")[0] for line in other.column_warnings] == ["q.jsonl row 0: column file_name"]


@pytest.mark.parametrize(
    ("column", "value", "looks"),
    [
        ("video", "clip.mp4", "looks like paths of videos that exist"),
        ("videos", ["no.mp4"], "looks like names of videos that do not exist"),
        ("shot", "clip.mp4", "looks like paths of videos that exist"), ("video_path", "clip", "has a name typical of videos"),
        ("video", "v_0123", "has a name typical of videos"), ("clips", ["a"], "has a name typical of videos"),
        ("audio", "a.wav", "looks like names of audio that do not exist"), ("audios", ["x"], "has a name typical of audio"),
        ("sound", {"array": [0.0], "sampling_rate": 8000}, "contains decoded audio"), ("speech", "x", "has a name typical of audio"),
        ("shot", base64.b64encode(b"RIFF\0\0\0\0WAVEfmt " + bytes(99)).decode(), "contains audio in base64"),
    ],
)  # fmt: skip
def test_videos_and_audio_are_refused(column: str, value: object, looks: str, tmp_path: Path) -> None:
    """They are refused even if the row has an image that is read."""
    for more in ({}, {"image": "red.png"}):
        (error,) = look(tmp_path, {column: value} | more).errors
        assert error.startswith(f"q.jsonl row 0: column {column} {looks} and is not read: ")


def test_keys_of_mm_hint_and_structs_that_hold_media(tmp_path: Path) -> None:
    """Columns that task.data.columns cannot name have a different remedy."""
    for row, column in (
        ({"mm_hint": {"hint_type": "image", "hint_paths": ["red.png"]}}, "mm_hint.hint_paths"),
        ({"reward_model": {"ground_truth": "B", "image": "red.png"}}, "reward_model.image"),
        ({"extra_info": {"images": ["red.png"]}}, "extra_info.images"),
        ({"multi_modal_data": {"image": ["red.png"]}}, "multi_modal_data"),
    ):
        (error,) = look(tmp_path, row).errors
        shows = "looks like paths of pictures that exist and is not read"
        assert error == f"q.jsonl row 0: column {column} {shows}: write them into a column images"


WORDS = [
    "<video>", "<audio>", "<image 1>", "<image2>", "<img", "<bbox>", "<ref-object>", "data:image/", "![red](", "<image_1>", "<|image_1|>",
    "<Image>", "<ImageHere>", "[IMG]", "<image_placeholder>", "<start_of_image>", "<|begin_of_image|>", "<|media_pad|>", "<point>",
    "\\includegraphics", "[image:", "[Figure:", "< image >", "<image >", "< Image>",
]  # fmt: skip


@pytest.mark.parametrize("word", WORDS)
def test_words_of_other_tools_for_media(word: str, tmp_path: Path) -> None:
    (warning,) = look(tmp_path, {"question": f"{word} What?", "image": "red.png"}).column_warnings
    shows = f"contains {word} in its text, which is not a placeholder here: the policy reads it as plain text"
    assert warning.startswith(f"q.jsonl row 0: column question {shows}")


def test_numbers_under_the_name_of_a_video_are_none(tmp_path: Path) -> None:
    words = {"sound": "a low hum", "speech": "Hello everyone."}
    found = look(tmp_path, {"video": False, "audio": 0, "videos": [None], "clips": ["", []], "image": "red.png"} | words)
    assert (found.errors, found.column_warnings) == ([], [])


@pytest.mark.parametrize("kind", ["Image", "Video", "Audio"])
def test_the_type_in_a_files_schema(kind: str, tmp_path: Path) -> None:
    """The type in the schema is used whatever the bytes are, because `datasets` has written it."""
    struct = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    table = datasets.Dataset.from_list([ASKED | {"shot": {"bytes": b"???", "path": None}}], features=datasets.Features({
        "question": datasets.Value("string"), "answer": datasets.Value("string"), "shot": struct,
    }))  # fmt: skip
    arrow = table.data.table.replace_schema_metadata(
        {b"huggingface": b'{"info": {"features": {"shot": [{"_type": "%s"}]}}}' % kind.encode()}
    )
    with pa.OSFile(str(tmp_path / "q.arrow"), "wb") as file, pa.ipc.new_stream(file, arrow.schema) as stream:
        stream.write_table(arrow)
    (error,) = survey_questions(open_questions([str(tmp_path / "q.arrow")], images_root="", name="train")).errors
    assert error.startswith(f"q.arrow row 0: column shot has the type {kind} in the file's schema and is not read: ")


@pytest.mark.parametrize("kind", ["Video", "Audio"])
def test_the_type_of_a_field_in_a_files_schema(kind: str, tmp_path: Path) -> None:
    """The type of a field in a struct or a list of structs is found. The row also has an image that
    is read; without the type, bytes of an unknown format would count as an additional image.
    """
    feature = {"_type": kind, "decode": False}
    clip = {"bytes": b"???", "path": None}
    for column, features, value in (
        ("m", {"x": feature}, {"x": clip}),
        ("m", [{"x": feature}], [{"x": clip}]),
        ("m", {"_type": "List", "feature": {"x": feature}}, [{"x": clip}]),
        ("m", {"_type": "Sequence", "feature": {"x": feature}}, {"x": [clip]}),
    ):
        info = {"info": {"features": {column: features, "question": {"dtype": "string", "_type": "Value"}}}}
        table = pa.Table.from_pylist([ASKED | {"image": make_png("red"), column: value}])
        table = table.replace_schema_metadata({b"huggingface": json.dumps(info).encode()})
        with pa.OSFile(str(tmp_path / "q.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
        (error,) = survey_questions(open_questions([str(tmp_path / "q.arrow")], images_root="", name="train")).errors
        assert error.startswith(f"q.arrow row 0: column m has the type {kind} in the file's schema and is not read: ")


CHOICES = "looks like the answer choices, which the question does not contain and is not read: write them into the question"


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"options": ["a cat", "a dog"]}, "options"), ({"choices": {"text": ["a cat", "a dog"], "label": ["A", "B"]}}, "choices"),
        ({"options": "['a cat', 'a dog']"}, "options"), ({"options": "A. a cat\nB. a dog"}, "options"),
        ({"Choices": [{"label": "A", "text": "a cat"}]}, "Choices"),
        ({"options": {"A": {"text": "a cat"}, "B": {"text": "a dog"}}}, "options"),
        ({"endings": [{"text": "a cat", "id": 1}]}, "endings"), ({"others": {"A": "a cat", "B": "a dog"}}, "others"),
        ({"options": "A) a cat B) a dog"}, "options"), ({"options": '{"A": "a cat", "B": "a dog"}'}, "options"),
        ({"other": ["a cat", "b"]}, "other"),
        ({"A": "a cat", "B": "a dog", "C": "a cow"}, "A to C"), ({"option_a": "a cat", "option_b": "a dog"}, "option_a to option_b"),
        ({"extra_info": {"options": ["a cat", "a dog"]}}, "extra_info.options"), ({"options": {"A": "a cat", "B": "a dog"}}, "options"),
        ({"options": [1, 2, 3]}, "options"), ({"options": [1, 2], "question": "Is it 2 or 1?"}, ""),
        ({"question": "Is it a CAT, or\n(B) a dog?", "options": ["a cat", "a dog"]}, ""), ({"options": ["A", "B", "C"]}, ""),
        ({"question": "A. a cat B. a dog", "A": "a cat", "B": "a dog"}, ""), ({"other": ["a cat", "a dog"]}, ""),
        ({"things": [{"color": "b"}, {"color": "c"}]}, ""), ({"answers": ["b", "beta"]}, ""), ({"votes": ["b", "b", "c"]}, ""),
    ],
)  # fmt: skip
def test_choices_that_the_question_does_not_contain(row: dict, column: str, tmp_path: Path) -> None:
    found = look(tmp_path, *[{"image": "red.png"} | row] * 2)
    assert found.errors == [] and found.column_warnings == ([f"q.jsonl: column {column} {CHOICES}"] if column else [])


def test_options_in_their_forms() -> None:
    for value in (
        ["A. x y", "B. z"],
        "(A) x y\n(B) z",
        '["x y", "z"]',
        "x y; z",
        {"text": ["x y", "z"], "label": ["A", "B"]},
        {"A": "x y", "B": "z"},
        [{"label": "A", "text": "x y"}, {"label": "B", "text": "z"}],
        '[{"id": 1, "content": "x y"}, {"id": 2, "content": "z"}]',
    ):
        assert parse_options(value) == ["x y", "z"], value
    assert parse_options([1, 2.5]) == ["1", "2.5"] and parse_options(3) == parse_options({}) == []


@pytest.mark.parametrize(
    ("row", "looks"),
    [
        ({"loss": False}, "weights or masks the loss"), ({"loss_mask": [0, 1]}, "weights or masks the loss"),
        ({"weight": 0.5}, "weights or masks the loss"),
        ({"weight": 0}, "weights or masks"), ({"sample_weight": "0.2"}, "weights or"), ({"weights": [1, 2]}, "weights or"),
        ({"tools": [{"name": "zoom"}]}, "describes tools"), ({"functions": "[]{}"}, "describes tools"),
        ({"chosen": "x", "rejected": "y"}, "looks like one side of a preference"), ({"input_ids": [1, 2]}, "looks like tokens"),
        ({"reasoning_content": "So."}, "looks like a response's reasoning"),
        ({"system_prompt": "Be kind."}, "looks like a part of the prompt"),
        ({"context": "A text."}, "looks like a part of the prompt"), ({"extra_info": {"loss": 0}}, "weights or masks the loss"),
        ({"objects": {"ref": ["cat"], "bbox": [[1, 2, 3, 4]]}}, "names objects"), ({"tool_choice": "auto"}, "looks like a request setting"),
        ({"enable_thinking": False}, "looks like a request setting"),
        ({"weight": "5 kg"}, ""), ({"weight": 1.0}, ""), ({"loss": None, "tools": []}, ""), ({"context": "what?"}, ""), ({"level": 3}, ""),
    ],
)  # fmt: skip
def test_columns_that_change_what_is_learned(row: dict, looks: str, tmp_path: Path) -> None:
    found = look(tmp_path, {"image": "red.png"} | row)
    assert found.errors == [] and bool(found.column_warnings) == bool(looks)
    assert all(f" {looks}" in line and " and is not read: " in line for line in found.column_warnings)
    assert len(found.column_warnings) == (2 if "chosen" in row else bool(looks))


def test_a_second_question_and_pictures_in_messages_that_are_not_read(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": [{"type": "image", "image": "red.png"}, {"type": "text", "text": "What?"}]}]
    (error,) = look(tmp_path, {"messages": talk}).errors
    assert error.startswith(
        "q.jsonl row 0: column messages looks like paths of pictures that exist and is not read: write them into a column"
    )
    (warning,) = look(tmp_path, {"problem": "Why?", "image": "red.png"}).column_warnings
    assert warning.startswith(
        "q.jsonl row 0: column problem is a question in addition to question and is not read: the question is read from question;"
    )
    assert look(tmp_path, {"problem": "What?", "image": "red.png"}).column_warnings == []


def test_the_same_question_in_messages_is_no_second_one(tmp_path: Path) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    for content in ("<image>What?", "What?", parts):
        talk = [{"role": "user", "content": content}]
        assert look(tmp_path, {"messages": talk, "image": "red.png"}).column_warnings == []
    for talk in ([{"role": "user", "content": "Why?"}], [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What?"}]):
        (warning,) = look(tmp_path, {"messages": talk, "image": "red.png"}).column_warnings
        assert warning.startswith("q.jsonl row 0: column messages is a question in addition to question and is not read")


def test_a_file_that_is_one_object_around_its_rows(tmp_path: Path) -> None:
    """COCO and VQA v2 are published in this form. The error names keys that may contain the rows,
    except conversations.
    """
    for given, hint in (
        ({"info": {}, "questions": [{"question": "What?", "image_id": 1}]}, r" \(the rows may be in questions: write that list,"),
        ({"images": [{"id": 1}], "annotations": [{"caption": "x"}]}, r" \(the rows may be in images or annotations: "),
        ({"conversations": [{"from": "human", "value": "x"}]}, "$"),
    ):
        (tmp_path / "q.json").write_text(json.dumps(given))
        (line,) = survey_questions(open_questions([str(tmp_path / "q.json")], images_root="", name="train")).errors
        assert re.match("q.json row 0: question: is missing. Columns: .* Choose one: 'task.data.columns={question: \\w+}'" + hint, line), (
            line
        )


def test_columns_that_only_some_rows_fill(tmp_path: Path) -> None:
    """A value in only one row is found among nulls in a JSON file and among empty cells in a
    table.
    """
    found = look(tmp_path, *[{"image": "red.png", "shot": None}] * 50, {"shot": "red.png"}, {"image": "red.png"})
    assert found.errors == [f"q.jsonl row 50: column shot looks like paths of pictures that exist and is not read (1 of 52 rows): {CHOOSE}"]
    (tmp_path / "q.csv").write_text("question,answer,shot\n" + "q,a,\n" * 5 + "q,a,red.png\n")
    (error,) = survey_questions(open_questions([str(tmp_path / "q.csv")], images_root="", name="train")).errors
    assert error == f"q.csv row 5: column shot looks like paths of pictures that exist and is not read (1 of 6 rows): {CHOOSE}"


def test_data_without_pictures_is_warned_of(tmp_path: Path) -> None:
    (warning,) = look(tmp_path, *[{"level": 1}] * 4).column_warnings
    assert warning == (
        "0 images in 4 rows: the policy sees only text. Columns: question, answer, level. "
        "If one contains images: 'task.data.columns={images: COLUMN}'"
    )


def test_a_missing_column_is_one_line(tmp_path: Path) -> None:
    """A missing column causes one error for 100 rows with empty cells, for several files, and for
    only some of the rows.
    """
    (tmp_path / "train.csv").write_text("filename,question,label\n" + "red.png,What?,red\n" * 99 + "red.png,What?,\n")
    (error,) = survey_questions(open_questions([str(tmp_path / "train.csv")], images_root="", name="train")).errors
    remedy = "Columns: filename, question, label. Choose one: 'task.data.columns={answer: label}'"
    assert error == f"train.csv: no answer (all 100 rows). {remedy}"
    with pytest.raises(ValueError, match=r"^train.csv: no answer \(all 100 rows\). .*label}'$"):
        load_questions([str(tmp_path / "train.csv")], images_root="", name="train")
    (tmp_path / "more.csv").write_text((tmp_path / "train.csv").read_text())
    paths = [str(tmp_path / name) for name in ("train.csv", "more.csv")]
    (error,) = survey_questions(open_questions(paths, images_root="", name="train")).errors
    assert error == f"train.csv (and 1 more files): no answer (all 200 rows). {remedy}"
    path = write_rows(tmp_path / "some.jsonl", [{"question": "?", "answer": "a"}, {"question": "?"}, {"question": "?", "answer": None}])
    (error,) = survey_questions(open_questions([str(path)], images_root="", name="train")).errors
    assert (
        error
        == "some.jsonl row 1: answer: is missing (and 1 more rows). Columns: question. Choose one: 'task.data.columns={answer: COLUMN}'"
    )
    path = write_rows(tmp_path / "text.jsonl", [{"Query": "?", "answer": "a"}] * 2)
    (error,) = survey_questions(open_questions([str(path)], images_root="", name="train")).errors
    assert error == "text.jsonl: no question (all 2 rows). Columns: Query, answer. Choose one: 'task.data.columns={question: Query}'"


@pytest.mark.parametrize("ours", ["images", "id", "data_source"])
def test_a_chosen_column_that_no_row_has(ours: str, tmp_path: Path) -> None:
    """A column with a recognized name is not silently read in place of the named one."""
    row = {"image": "red.png", "id": 3, "data_source": "vstar"}
    found = look(tmp_path, row, row, columns=ColumnSettings(**{ours: "typo"}))
    assert found.errors == [f"task.data.columns.{ours}=typo: no row has that column; columns: question, answer, image, id, data_source"]


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name / "a.jsonl", [ASKED, {"question": "?", "answer": ""}])
    (first, second) = survey_questions(
        open_questions([str(tmp_path / name / "a.jsonl") for name in ("one", "two")], images_root="", name="train")
    ).errors
    assert (first, second) == ("one/a.jsonl row 1: answer: is empty", "two/a.jsonl row 1: answer: is empty")


def test_a_file_that_cannot_be_looked_into_is_no_picture(tmp_path: Path) -> None:
    record = DataRecord({}, "q.jsonl row 0", tmp_path / "q.jsonl", tmp_path)
    for text in ("a/\0b", "bare", "x" * 5000 + "/a", "/" + "a" * 300, "bare/none"):
        assert find_media(text, record) is None
