"""Tests questions that are given as chat messages: each message is part of the prompt, or the row
is refused. Oracle: payloads written by hand.
"""

import base64
import json
import tempfile
from pathlib import Path

import pytest

from megatron_rl.config import ColumnSettings
from megatron_rl.data.questions import load_questions
from tests.support.data_files import make_png, write_rows


@pytest.fixture(autouse=True)
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cache"))
    for color in ("red", "blue"):
        (tmp_path / f"{color}.png").write_bytes(make_png(color))


COLORS = {(255, 0, 0): "red", (0, 0, 255): "blue"}
SHOWN, SHOWN_BLUE, TEXT = {"type": "image", "image": "red.png"}, {"type": "image", "image": "blue.png"}, {"type": "text", "text": "Which?"}


def user(content: object, **more: object) -> dict:
    return {"role": "user", "content": content, **more}


def said(role: str, content: str = "A") -> dict:
    return {"role": role, "content": content}


def asked(messages: object, tmp_path: Path, *, columns: ColumnSettings | None = None, **more: object) -> tuple[str, str, list[str]]:
    """Return the question, the system message and the colors of the images."""
    name = "talk" if columns else "messages"
    path = write_rows(tmp_path / "q.jsonl", [{name: messages, "answer": "x", **more}])
    payload = load_questions([str(path)], images_root="", name="train", columns=columns)[0].payload
    return payload["question"], payload["system"], [COLORS[image.open().getpixel((0, 0))] for image in payload["images"]]


@pytest.mark.known_failure("messages-dropped")
@pytest.mark.parametrize(
    ("messages", "question", "system", "colors"),
    [
        ([user([SHOWN]), user([TEXT])], "<image>\nWhich?", "", ["red"]),
        ([user("Box."), user([SHOWN_BLUE, TEXT]), user([SHOWN])], "Box.\n<image>Which?\n<image>", "", ["blue", "red"]),
        ([said("system"), said("developer", "B"), user("q?")], "q?", "A\n\nB", []),
        ([said("developer"), user("q?")], "q?", "A", []),
        ([user("q?"), said("system"), user("r?")], "q?\nr?", "A", []),
        ([user("q?"), said("assistant"), said("tool"), said("assistant")], "q?", "", []),
        ([{"from": "system", "value": "A"}, {"from": "human", "value": "q?"}, {"from": "gpt", "value": "x"}], "q?", "A", []),
        ([user([{"image": "red.png"}, {"text": "q?"}])], "<image>q?", "", ["red"]),
        ([user([{"type": "input_image", "image_url": "red.png"}, {"type": "input_text", "text": "q?"}])], "<image>q?", "", ["red"]),
        ([user([{"type": "image", "path": "red.png"}, TEXT])], "<image>Which?", "", ["red"]),
        ([user([{"type": "image", "base64": base64.b64encode(make_png("blue")).decode()}, TEXT])], "<image>Which?", "", ["blue"]),
        ([user([{"type": "image_url", "image_url": {"url": "red.png", "detail": "auto"}}, TEXT])], "<image>Which?", "", ["red"]),
        ([user("q?", id=3, loss=False, weight=0, name="")], "q?", "", []),
        ([user("q?", tool_calls=[], reasoning_content=None)], "q?", "", []),
        (json.dumps([said("system"), user([SHOWN, TEXT])]), "<image>Which?", "A", ["red"]),
        ("[1, 2] is a list of what?", "[1, 2] is a list of what?", "", []),
        (json.dumps([{"id": 1} | user("q?")]), "q?", "", []),
        (json.dumps(user("q?")), "q?", "", []),
        (json.dumps({"messages": [said("system"), user("q?")]}), "q?", "A", []),
        (json.dumps(json.dumps([user([SHOWN, TEXT])])), "<image>Which?", "", ["red"]),
        ('"To be" is by whom?', '"To be" is by whom?', "", []),
        ('"To be"', '"To be"', "", []),
        ('{"a": 1}', '{"a": 1}', "", []),
        ('[{"a": 1}] has how many keys?', '[{"a": 1}] has how many keys?', "", []),
        ("[]", "[]", "", []),
    ],
)
def test_messages_are_joined_in_order(messages: object, question: str, system: str, colors: list[str], tmp_path: Path) -> None:
    assert asked(messages, tmp_path) == (question, system, colors)


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([user("q?"), said("tool"), user("r?")], r"messages\[1\]: is a tool message, which is not supported before the answer"),
        ([user("q?"), said("tool")], r"messages\[1\]: is a tool message, which is not supported before the answer"),
        ([user("q?"), said("assistant"), user("r?")], "messages: has user messages after an assistant message; the"),
        ([user("q?"), said("assistant"), said("system")], "messages: has a system message after an assistant"),
        ([said("assistant")], "messages: has no user message"),
        ([said("moderator"), user("q?")], r"messages\[0\].role: 'moderator' is not one of system, developer, user"),
        ([user("q?"), said("assistant"), said("critic")], r"messages\[2\].role: 'critic' is not one of"),
        ([{"content": "q?"}], r"messages\[0\].role: None is not one of"),
        ([user([{"type": "video", "video": "a.mp4"}, TEXT])], r"messages\[0\].content\[0\]: has the type 'video', which is not supported"),
        ([user([{"type": "input_audio", "input_audio": {}}, TEXT])], r"messages\[0\].content\[0\]: has the type 'input_audio'"),
        ([user([TEXT, {"type": "file", "file": {}}])], r"messages\[0\].content\[1\]: has the type 'file'"),
        ([user([{"type": "tool_use", "id": "1"}])], r"messages\[0\].content\[0\]: has the type 'tool_use'"),
        ([user(["q?"])], r"messages\[0\].content\[0\]: must be a mapping, not str"),
        ([user(None)], r"messages\[0\]: content must be text or a list of parts, not NoneType"),
        ([user("q?", tool_calls=[{"id": 1}])], r"messages\[0\].tool_calls: is not read"),
        ([user("q?", reasoning_content="So.")], r"messages\[0\].reasoning_content: is not read \('So.'\)"),
        ([user("q?", name="Ann")], r"messages\[0\].name: is not read"),
        ([user("q?", loss=True)], r"messages\[0\].loss: is not read"),
        ([user("q?", images=["red.png"])], r"messages\[0\].images: is not read"),
        ([said("system") | {"image": "red.png"}, user("q?")], r"messages\[0\].image: is not read"),
        ([user([SHOWN | {"max_pixels": 100}, TEXT])], r"messages\[0\].content\[0\].max_pixels: is not read"),
        ([user([SHOWN | {"text": "q?"}])], r"messages\[0\].content\[0\].text: is in an image part; move it"),
        ([user([SHOWN | {"path": "blue.png"}, TEXT])], r"messages\[0\].content\[0\]: names its image more than once: image, path"),
        ([user([SHOWN | {"image": {"path": "red.png", "bbox": [0, 0, 9, 9]}}, TEXT])], r"content\[0\].image.bbox: is not read"),
        ([user([{"type": "image_url", "image_url": {"url": "red.png", "crop": 3}}, TEXT])], r"content\[0\].image_url.crop: is not read"),
        ([{"role": "system", "content": [SHOWN]}, user("q?")], r"messages\[0\]: contains an image in a system message"),
        ("[{'role': 'user', 'content': 'q?'}]", "messages: looks like messages but is not valid"),
        ("[{'id': 3, 'role': 'user', 'content': 'q?'}]", "messages: looks like messages but is not valid"),
        ([user(json.dumps([SHOWN, TEXT]))], r"messages\[0\]: the content is text that contains a list of parts; store the list itself"),
        (json.dumps([SHOWN, TEXT]), "messages: is text that contains a list of parts; store only the question here, and the images"),
    ],
)
def test_what_does_not_reach_the_policy_is_refused(messages: object, error: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^q.jsonl row 0: .*{error}"):
        asked(messages, tmp_path)


def test_pictures_of_messages_and_of_a_column(tmp_path: Path) -> None:
    """Placeholders without an image in the messages take the images of the column in order. The
    numbers must match.
    """
    places = [user([{"type": "image"}, SHOWN_BLUE, TEXT])]
    assert asked(places, tmp_path, images=["red.png"]) == ("<image><image>Which?", "", ["red", "blue"])
    assert asked([user("<image>a"), user([SHOWN_BLUE])], tmp_path, images=["red.png"]) == ("<image>a\n<image>", "", ["red", "blue"])
    for images, num in ((["red.png", "blue.png"], 2), ([], 0)):
        with pytest.raises(
            ValueError,
            match=f"question: has 1 <image> placeholders without an image in the messages, but the image column has {num} images",
        ):
            asked(places, tmp_path, images=images)
    with pytest.raises(
        ValueError, match="question: has 0 <image> placeholders without an image in the messages, but the image column has 1 images"
    ):
        asked([user([SHOWN_BLUE, TEXT])], tmp_path, images=["red.png"])


@pytest.mark.parametrize("content", ["<image>", "Here: <image>", [{"type": "image"}], [SHOWN, TEXT]])
def test_a_picture_that_answers_is_not_shown(content: object, tmp_path: Path) -> None:
    """An image in a message after the question is refused. Otherwise the column's image would be
    placed before the question.
    """
    for role in ("assistant", "tool"):
        talk = [user("Draw a cat."), said("assistant"), said(role, content)]
        with pytest.raises(ValueError, match=r"messages\[2\]: contains an image after the question; only images of the question are read"):
            asked(talk, tmp_path, images=["red.png"])


def test_a_picture_in_the_column_system_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="system: contains <image>, but a system message has no images"):
        asked([user("q?")], tmp_path, system="<image> is a map.", images=["red.png"])


def test_parts_that_are_numbered(tmp_path: Path) -> None:
    """Image parts with an index, as in llava-instruct-mix, take the image of the column with this
    index.
    """
    parts = [{"type": "image", "index": 0}, {"type": "image", "index": 1}, TEXT]
    assert asked([user(parts)], tmp_path, images=["red.png", "blue.png"])[2] == ["red", "blue"]
    with pytest.raises(ValueError, match=r"messages\[0\].content\[0\].index: is 1, but the image has index 0; list images in order"):
        asked([user([parts[1], parts[0], TEXT])], tmp_path, images=["red.png", "blue.png"])


def test_a_system_column_beside_a_system_message(tmp_path: Path) -> None:
    assert asked([said("system"), user("q?")], tmp_path, system="A")[1] == "A"
    with pytest.raises(ValueError, match="system: differs from the system message in messages; keep one of them"):
        asked([said("system"), user("q?")], tmp_path, system="B")


def test_a_column_of_messages_by_another_name(tmp_path: Path) -> None:
    assert asked([said("system"), user([SHOWN, TEXT])], tmp_path, columns=ColumnSettings(question="talk")) == (
        "<image>Which?",
        "A",
        ["red"],
    )


def test_an_answer_that_only_the_assistant_gives(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "q.jsonl", [{"messages": [user("q?"), said("assistant", "4")]}])
    with pytest.raises(
        ValueError, match=r"^q.jsonl row 0: answer: is missing. Columns: messages. .*the assistant's message is not read as the"
    ):
        load_questions([str(path)], images_root="", name="train")


def test_a_nul_character_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"messages\[0\]: contains a NUL character"):
        asked([user("q\0?")], tmp_path)
