"""Tests questions with images: all forms of rows, lazy decoding, and errors with file and row.
Oracles: payloads by hand, the colors of generated images, and counted opens.
"""

import base64
import hashlib
import pickle
import tempfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from megatron_rl.config import DataSettings
from megatron_rl.data import images
from megatron_rl.data.images import convert_to_rgb
from megatron_rl.data.questions import load_questions, load_split, open_questions
from megatron_rl.data.survey import survey_questions
from megatron_rl.errors import InfraError
from tests.support.data_files import SUFFIXES, make_png, write_rows


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write Arrow copies to a folder of the test."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cache"))


def training_row(**changes: object) -> dict:
    return {
        "prompt": [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "<image>\nWhich color? Think first."}],
        "data_source": "vstar", "ability": "visual_search", "env_name": "visual_toolbox_v2",
        "reward_model": {"ground_truth": "red", "style": "model"},
        "extra_info": {"answer": "A. red", "index": 7, "question": "Which color?", "split": "train", "bbox": [1, 2, 3, 4]},
        "images": [{"bytes": make_png("red")}],
    } | changes  # fmt: skip


PAYLOAD = {
    "question": "<image>\nWhich color?", "answer": "red", "system": "", "data_source": "vstar", "ability": "visual_search",
    "env_name": "visual_toolbox_v2", "index": 7, "extra": {"split": "train", "bbox": [1, 2, 3, 4]}, "videos": (),
}  # fmt: skip


def read(path: Path, **given: str) -> list[dict]:
    """Return the payloads, with opened images."""
    found = load_questions([str(path)], images_root=given.get("images_root", ""), name="train")
    return [{**example.payload, "images": [image.open() for image in example.payload["images"]]} for example in found]


def colors(payload: dict) -> list[tuple[int, int, int]]:
    return [picture.getpixel((0, 0)) for picture in payload["images"]]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_columns_of_training_files(suffix: str, tmp_path: Path) -> None:
    (payload,) = read(write_rows(tmp_path / f"train{suffix}", [training_row()]))
    (picture,) = payload.pop("images")
    assert payload == PAYLOAD
    assert (picture.mode, picture.size, picture.getpixel((29, 19))) == ("RGB", (30, 20), (255, 0, 0))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_pictures_as_bytes_path_hash_hint_and_none(suffix: str, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    (folder / "ab").mkdir(parents=True)
    (folder / "blue.png").write_bytes(make_png("blue"))
    digest = hashlib.sha256(make_png("lime")).hexdigest()
    (folder / digest[:2]).mkdir(exist_ok=True)
    (folder / digest[:2] / f"{digest}.png").write_bytes(make_png("lime"))
    plain = {"question": "Which color?", "answer": 3}
    rows = [
        {**plain, "images": [{"bytes": make_png("red")}, {"path": "blue.png"}]},
        {**plain, "images": [{"path": digest}]},
        {**plain, "images": [], "mm_hint": {"hint_path": "blue.png", "hint_type": "image"}},
        {**plain, "image": str(folder / "blue.png")},
        {**plain, "image_path": "blue.png", "id": 12},
        plain,
    ]
    payloads = read(write_rows(tmp_path / f"own{suffix}", rows), images_root=str(folder))
    red, lime, blue = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    assert [colors(payload) for payload in payloads] == [[red, blue], [lime], [blue], [blue], [blue], []]
    assert [payload["question"] for payload in payloads] == ["<image>\n" * number + "Which color?" for number in (2, 1, 1, 1, 1, 0)]
    assert [payload["index"] for payload in payloads] == [0, 1, 2, 3, 12, 5]
    assert {payload["answer"] for payload in payloads} == {"3"}


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_pictures_in_base64(format: str, suffix: str, tmp_path: Path) -> None:
    """Base64 text of 900 pixels, which is short enough to be a file name, and of 90,000 pixels of
    noise, which is too long for one.
    """
    for width in (30, 300):
        content = BytesIO()
        pixels = np.random.default_rng(0).integers(0, 255, (width, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(content, format=format)
        in_text = base64.b64encode(content.getvalue()).decode()
        plain = {"question": "?", "answer": "a"}
        rows = [plain | {"image": in_text}, plain | {"images": [in_text]}, plain | {"images": [f"data:image/x;base64,{in_text}"]}]
        (one,), (two,), (three,) = (payload["images"] for payload in read(write_rows(tmp_path / f"{width}{suffix}", rows)))
        with Image.open(content) as oracle:
            assert one.tobytes() == two.tobytes() == three.tobytes() == oracle.convert("RGB").tobytes()


def test_a_file_whose_name_might_be_base64(tmp_path: Path) -> None:
    name = base64.b64encode(make_png("blue")[:12]).decode()
    (tmp_path / name).write_bytes(make_png("lime"))
    (payload,) = read(write_rows(tmp_path / "own.jsonl", [{"question": "?", "answer": "a", "image": name}]))
    assert colors(payload) == [(0, 255, 0)]


@pytest.mark.known_failure("base64-in-messages")
@pytest.mark.parametrize("value", ["A" * 100_000, "no/" * 40_000 + "a.png", "\u4e2d" * 300, "QUJD" * 30, {"x" * 5000: 1}], ids=range(5))
def test_messages_stay_short(value: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^own.jsonl row 0: image: (no such file|must have|\S+ is base64, but)") as said:
        load_questions(
            [str(write_rows(tmp_path / "own.jsonl", [{"question": "?", "answer": "a", "image": value}]))], images_root="/data", name="train"
        )
    assert len(str(said.value)) < 80 + 160


def test_paths_start_beside_the_file_that_names_them(tmp_path: Path) -> None:
    for name, color in {"one": "red", "two": "blue"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(make_png(color))
        write_rows(tmp_path / name / "own.jsonl", [{"question": "?", "answer": "x", "image": "a.png"}])
    found = load_questions([str(tmp_path / name / "own.jsonl") for name in ("one", "two")], images_root="", name="eval")
    assert [example.payload["images"][0].open().getpixel((0, 0)) for example in found] == [(255, 0, 0), (0, 0, 255)]
    assert [example.id for example in found] == ["eval/0", "eval/1"]
    assert found[1].payload["images"][0].where == "two/own.jsonl row 0: image"


def test_where_a_question_shows_its_pictures(tmp_path: Path) -> None:
    both = [{"bytes": make_png("red")}, {"bytes": make_png("blue")}]
    parts = [{"type": "image"}, {"type": "text", "text": "against"}, {"type": "image"}, {"type": "text", "text": "?"}]
    rows = [
        {"question": "Is <image> or <image> red?", "answer": "1", "images": both},
        {"prompt": [{"role": "user", "content": parts}], "answer": "1", "images": both},
    ]
    assert [payload["question"] for payload in read(write_rows(tmp_path / "a.jsonl", rows))] == [
        rows[0]["question"],
        "<image>against<image>?",
    ]


TALK = [{"role": role, "content": "?"} for role in ("user", "assistant", "user")]
BAD = {
    "reward_model": ("red", r"reward_model: must be a mapping, not str"),
    "prompt": ([], r"question: is missing"),
    "data_source": (3, r"data_source: must be text, not int"),
    "extra_info": ({"question": "a <image> and <image>"}, r"question: has 2 <image> placeholders for 1 images"),
    "ability": ("\ud800", r"ability: cannot be encoded as UTF-8"),
    "images": ([{"path": "no.png"}], r"images\[0\]: no such file .*no.png; task.data.images is the folder"),
    "env_name": ("<|image_pad|>", r"env_name: contains <\|image_pad\|>; write <image> for an image"),
    "image": (["a.png"], r"images and image: each contain images"),
    "mm_hint": (
        {"hint_type": "video", "hint_path": "a.mp4"},
        r"mm_hint: hint_type must be image \(or video, if the row has no images\), but is video",
    ),
}


@pytest.mark.parametrize("column", BAD)
def test_a_bad_row_is_named(column: str, tmp_path: Path) -> None:
    value, said = BAD[column]
    row = training_row(**{column: value})
    if column == "prompt":
        del row["extra_info"], row["prompt"]
    path = write_rows(tmp_path / "train.jsonl", [training_row(), row, training_row()])
    with pytest.raises(ValueError, match=rf"^train.jsonl row 1: {said}"):
        load_questions([str(path)], images_root="", name="train")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "?", "answer": "  "}, "answer: is empty"),
        ({"question": "?"}, "answer: is missing"),
        ({"question": "?", "answer": ["a", "b"]}, "answer: must be text or a number, not list"),
        ({"question": " ", "answer": "a"}, "question: is empty"),
        ({"question": "?", "answer": "a", "extra_info": {"index": [1]}}, "index: must be text or a whole number, not list"),
        ({"question": "?", "answer": "a", "images": [5]}, r"images\[0\]: must be a path, bytes or a SHA-256, but is int"),
        ({"question": "?", "answer": "a", "images": [{"url": "x"}]}, r'images\[0\]: must have "bytes" or "path", but has url'),
        (
            {"question": "?", "answer": "a", "images": [{"bytes": "not base64!"}]},
            r"images\[0\]: the key bytes must contain raw bytes, or base64 in JSON",
        ),
        ({"question": "?", "answer": "a", "images": ["a\0b"]}, r"images\[0\]: no such file"),
        ({"question": "?", "answer": "a", "images": ["0" * 64]}, r"images\[0\]: .* contains no file with the SHA-256 0000"),
        ({"prompt": [{"role": "system", "content": "x"}], "answer": "a"}, "prompt: has no user message"),
        ({"prompt": 3, "answer": "a"}, "prompt: must be text, not int"),
        ({"prompt": TALK, "answer": "a"}, "prompt: has user messages after an assistant message; the"),
    ],
)
def test_what_a_row_lacks(row: dict, said: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "own.jsonl", [row])
    with pytest.raises(ValueError, match=f"^own.jsonl row 0: {said}"):
        load_questions([str(path)], images_root="", name="train")


def test_decoding_is_lazy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image with a valid header and damaged pixels raises an error only when it is opened.
    Loading the questions decodes no image; opens are counted.
    """
    rows = [{"question": "?", "answer": str(number), "image": f"{number}.png"} for number in range(50)]
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    for number in range(50):
        noise.save(tmp_path / f"{number}.png")
    whole = (tmp_path / "40.png").read_bytes()
    (tmp_path / "40.png").write_bytes(whole[: len(whole) // 2] + bytes(40) + whole[len(whole) // 2 + 40 :])
    decoded = []
    monkeypatch.setattr(images, "convert_to_rgb", lambda picture: decoded.append(picture) or convert_to_rgb(picture))
    found = load_questions([str(write_rows(tmp_path / "own.jsonl", rows))], images_root="", name="train")
    assert [example.payload["answer"] for example in found] == [str(number) for number in range(50)]
    assert decoded == []
    assert found[3].payload["images"][0].open().size == (64, 64) and len(decoded) == 1
    with pytest.raises(InfraError, match=r"^own.jsonl row 40: image: cannot be opened \("):
        found[40].payload["images"][0].open()
    (image,) = found[41].payload["images"]
    (tmp_path / "41.png").unlink()
    with pytest.raises(InfraError, match=r"^own.jsonl row 41: image: cannot be opened"):
        image.open()


def test_content_that_is_not_what_its_hash_says(tmp_path: Path) -> None:
    digest = hashlib.sha256(make_png("lime")).hexdigest()
    (tmp_path / f"{digest}.png").write_bytes(make_png("red"))
    path = write_rows(tmp_path / "own.jsonl", [{"question": "?", "answer": "a", "images": [digest]}])
    found = load_questions([str(path)], images_root="", name="train")
    with pytest.raises(InfraError, match="does not match the SHA-256 in its name"):
        found[0].payload["images"][0].open()


def test_slices_are_views_that_travel(tmp_path: Path) -> None:
    paths = [str(write_rows(tmp_path / f"{number}{suffix}", [{"question": "?", "answer": f"{number}.{row}"} for row in range(4)]))
             for number, suffix in enumerate(SUFFIXES)]  # fmt: skip
    found = pickle.loads(pickle.dumps(load_questions(paths, images_root="", name="train")))
    answers = [f"{number}.{row}" for number in range(3) for row in range(4)]
    assert [example.payload["answer"] for example in found] == answers
    assert [example.payload["answer"] for example in found[2:10:3]] == answers[2:10:3]
    assert [example.id for example in found[2:10:3][1:]] == ["train/5", "train/8"]
    assert found[-1].payload["answer"] == "2.3"
    settings = DataSettings(train=paths, eval=paths[1:], max_eval=5)
    assert len(load_split(settings, "train")) == 12
    assert [example.payload["answer"] for example in load_split(settings, "eval")] == answers[4:9]
    with pytest.raises(ValueError, match=r"^task.data.train=\[\]: set the question files \(docs/data.md\)"):
        load_split(DataSettings(), "train")


def test_files_without_rows(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"^task.data.train=\['.*empty.jsonl'\]: has no rows"):
        load_questions([str(tmp_path / "empty.jsonl")], images_root="", name="train")


def test_a_survey_counts_all_and_shows_twenty(tmp_path: Path) -> None:
    rows = [training_row(data_source="known") for _ in range(3)] + [training_row(data_source="new")]
    rows += [{"question": "?", "answer": ""} for _ in range(30)]
    rows += [{"question": "?", "answer": "a", "image": f"{number}.png"} for number in range(20)]
    rows[1]["images"] = [{"bytes": make_png()[:20]}]
    boxes = [[5, 5, 5, 9], [0, 0, 30, 20], [0, 0, 31, 20], [-1, 0, 2, 2], "x", [1, 2, 3]]
    rows[2]["extra_info"] = {"question": "?", "bboxes": boxes}
    found = survey_questions(
        open_questions([str(write_rows(tmp_path / "train.json", rows))], images_root="", name="train"),
        check_question=lambda example, sizes: [f"{example.payload['data_source']}, {sizes}"],
    )
    assert (found.num_rows, found.num_images, found.num_errors, len(found.errors), found.num_warnings) == (54, 3, 51, 20, 8)
    assert found.num_more_errors == 2, "of 22 kinds"
    assert found.sources == {"known": 2, "new": 1}
    assert (
        found.errors[0].startswith("train.json row 1: images[0]: ")
        and found.errors[1] == "train.json row 4: answer: is empty (and 29 more rows)"
    )
    assert found.warnings == [
        "train.json row 0: known, [(30, 20)] (and 1 more rows)",
        "train.json row 2: bboxes [5, 5, 5, 9] is empty",
        "train.json row 2: bboxes [0, 0, 31, 20] exceeds the image of 30x20 pixels",
        "train.json row 2: bboxes [-1, 0, 2, 2] exceeds the image of 30x20 pixels",
        "train.json row 2: bboxes x is not a list of four numbers",
        "train.json row 2: bboxes [1, 2, 3] is not a list of four numbers",
        "train.json row 3: new, [(30, 20)]",
    ]
    with pytest.raises(ValueError, match=r"\(and 21 more problems; launch/doctor.py lists them\)$"):
        found.raise_on_errors()


NAMES = ["bytes", "path", "ground_truth", "question", "answer", "index", "role", "content", "type", "bbox", "hint_path"]
TEXTS = st.text(max_size=5) | st.sampled_from(["<image>", "a.png", "user", "image", "/"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=6,
)
COLUMNS = st.sampled_from([
    "prompt", "data_source", "ability", "env_name", "reward_model", "extra_info", "mm_hint", "images", "image", "image_path", "question",
    "answer", "id",
])  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(COLUMNS, VALUES, max_size=3), drops=st.sets(COLUMNS, max_size=2))
def test_any_row_is_read_or_named(changes: dict, drops: set, tmp_path: Path) -> None:
    row = {key: value for key, value in (training_row() | changes).items() if key not in drops}
    path = write_rows(tmp_path / "any.jsonl", [row])
    found = survey_questions(open_questions([str(path)], images_root="", name="train"))
    if found.errors:
        assert found.errors[0].startswith("any.jsonl row 0: ")
        return
    (payload,) = read(path)
    assert payload["question"].count("<image>") == len(payload["images"]) and payload["question"].strip() and payload["answer"].strip()
    assert all(picture.mode == "RGB" for picture in payload["images"])
