"""Tests transcripts for SFT. Oracles: messages by hand, the same conversation in every format, and
the colors of generated images.
"""

import base64
import pickle
import tempfile
from pathlib import Path

import pytest

from megatron_rl.data.transcripts import load_transcripts
from tests.support.data_files import SUFFIXES, make_png, write_rows


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write Arrow copies to a folder of the test."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cache"))


def text(words: str) -> dict:
    return {"type": "text", "text": words}


RED, BLUE = {"bytes": make_png("red")}, {"bytes": make_png("blue")}
SAID = [
    ("system", "Use tools."),
    ("user", "red", "\nWhich?"),
    ("assistant", "<code>crop</code>"),
    ("user", "Look: ", "blue", "!"),
    ("assistant", "It is blue."),
]
"""Roles and message parts; a color stands for an image of this color."""
SPELLINGS = {
    "parts with their pictures": {
        "messages": [
            {"role": "system", "content": "Use tools."},
            {"role": "user", "content": [{"type": "image", "image": RED}, text("\nWhich?")]},
            {"role": "assistant", "content": [text("<code>crop</code>")]},
            {"role": "user", "content": [text("Look: "), {"type": "image", "image": BLUE}, text("!")]},
            {"role": "assistant", "content": "It is blue."},
        ]
    },
    "parts and a column": {
        "images": [RED, BLUE],
        "messages": [
            {"role": "system", "content": [text("Use tools.")]},
            {"role": "user", "content": [{"type": "image"}, text("\nWhich?")]},
            {"role": "assistant", "content": [text("<code>crop</code>")]},
            {"role": "user", "content": [text("Look: "), {"type": "image"}, text("!")]},
            {"role": "assistant", "content": [text("It is blue.")]},
        ],
    },
    "places and a column": {
        "images": [RED, BLUE],
        "messages": [
            {"role": "system", "content": "Use tools."},
            {"role": "user", "content": "<image>\nWhich?"},
            {"role": "assistant", "content": "<code>crop</code>"},
            {"role": "user", "content": "Look: <image>!"},
            {"role": "assistant", "content": "It is blue."},
        ],
    },
    "conversations": {
        "images": [RED, BLUE],
        "conversations": [
            {"from": "system", "value": "Use tools."},
            {"from": "human", "value": "<image>\nWhich?"},
            {"from": "gpt", "value": "<code>crop</code>"},
            {"from": "user", "value": "Look: <image>!"},
            {"from": "gpt", "value": "It is blue."},
        ],
    },
    "conversations and a column system": {
        "images": [RED, BLUE],
        "system": "Use tools.",
        "tools": "[]",
        "conversations": [
            {"from": "human", "value": "<image>\nWhich?"},
            {"from": "gpt", "value": "<code>crop</code>"},
            {"from": "observation", "value": "Look: <image>!"},
            {"from": "gpt", "value": "It is blue."},
        ],
    },
}


def said(messages: list) -> list[tuple]:
    """Return the messages in the form of SAID. The role `tool` is returned as `user`."""
    colors = {(255, 0, 0): "red", (0, 0, 255): "blue"}
    return [
        (
            turn["role"].replace("tool", "user"),
            *(part["text"] if part["type"] == "text" else colors[part["image"].getpixel((0, 0))] for part in turn["content"]),
        )
        for turn in messages
    ]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_means_the_same(spelling: str, suffix: str, tmp_path: Path) -> None:
    row = SPELLINGS[spelling]
    if suffix == ".parquet" and spelling == "parts with their pictures":  # all values of a Parquet column have the same type
        row = {"messages": [{**turn, "content": [text(turn["content"])] if isinstance(turn["content"], str) else turn["content"]}
                            for turn in row["messages"]]}  # fmt: skip
    read = load_transcripts([str(write_rows(tmp_path / f"sft{suffix}", [row, row]))], images_root="")
    assert [said(messages) for messages in read] == [SAID, SAID]
    assert [said(messages) for messages in pickle.loads(pickle.dumps(read))[1:]] == [SAID]


def test_pictures_as_data_addresses_and_paths(tmp_path: Path) -> None:
    (tmp_path / "blue.png").write_bytes(make_png("blue"))
    address = "data:image/png;base64," + base64.b64encode(make_png("red")).decode()
    content = [{"type": "image_url", "image_url": {"url": address}}, {"type": "image", "image": "blue.png"}]
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "Two."}]}
    read = load_transcripts([str(write_rows(tmp_path / "sft.jsonl", [row]))], images_root="")
    assert said(read[0]) == [("user", "red", "blue"), ("assistant", "Two.")]


def turns(*roles: str) -> dict:
    return {"messages": [{"role": role, "content": "x"} for role in roles]}


_, ASSISTANT = turns("user", "assistant")["messages"]


def shown(content: object, **columns: object) -> dict:
    return {"messages": [{"role": "user", "content": content}, ASSISTANT]} | columns


def replied(**reply: object) -> dict:
    return {"messages": [{"role": "user", "content": "x"}, {"role": "assistant"} | reply]}


GPT = [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]
BAD = {
    "silence": (replied(content="", tool_calls=[]), r"messages\[1\]: the assistant message is empty .* add text or remove the row"),
    "blank": (replied(content=[text(" \n")]), r"messages\[1\]: the assistant message is empty and would"),
    "no parts": (replied(content=[]), r"messages\[1\]: the assistant message is empty and would"),
    "only a picture": (
        replied(content=[{"type": "image", "image": RED}]),
        r"messages\[1\].content\[0\]: contains an image in a message with the role",
    ),
    "silence behind a column": (
        {"system": "s", "conversations": [GPT[0], GPT[1] | {"value": ""}]},
        r"conversations\[1\]: the assistant message is empty and would",
    ),
    "two systems": (
        turns("system", "user", "assistant") | {"system": "s"},
        "system: the system message is also given elsewhere; keep only one",
    ),
    "a system of parts": (turns("user", "assistant") | {"system": ["s"]}, "system: must be text, not list"),
    "tools of LLaMA-Factory": ({"conversations": GPT, "tools": '[{"name": "crop"}]'}, r"tools\[0\].type: Field required; write a list of"),
    "a long role": (turns("user", "x" * 1000), r"messages\[1\].role: role 'x{37}\.\.\.x{38}' is not one of"),
    "no messages": ({"text": "x"}, r"messages: is missing; a transcript must have messages, .*; this row has text$"),
    "both": (turns("user", "assistant") | {"conversations": []}, r"messages and conversations: each contain a conversation; keep one"),
    "empty": ({"messages": []}, r"messages: must end with an assistant message"),
    "user last": (turns("user", "assistant", "user"), r"messages: must end with an assistant message"),
    "assistant first": (
        turns("assistant"),
        r"messages: user and assistant messages must alternate after an optional system message; the roles are assistant",
    ),
    "two replies": (
        turns("user", "assistant", "assistant"),
        r"messages: user and assistant messages must alternate after an optional system message",
    ),
    "late system": (
        turns("user", "assistant", "system", "assistant"),
        r"messages: user and assistant messages must alternate after an optional system message",
    ),
    "a stranger": (turns("user", "critic"), r"messages\[1\].role: role 'critic' is not one of system, user, tool, assistant, human"),
    "no text": (shown(None), r"messages\[0\].content: is missing; write the text of the message, or"),
    "a film": (shown([{"type": "film"}]), r"messages\[0\].content\[0\]: a part must be of type text, image or image_url, not 'film'"),
    "no column": (
        shown("<image>"),
        r"messages\[0\]: has an image placeholder .* the row has no image column \(images, image, \.\.\)",
    ),
    "too few": (shown("<image><image>", images=[RED]), r"messages\[0\]: has an image placeholder"),
    "too many": (shown("<image>x", images=[RED, RED]), r"images: 2 images for 1 placeholders; write <image> for every image, or for none"),
    "control": (shown("<|im_end|>"), r"messages\[0\]: contains <\|im_end\|>"),
    "no file": (shown("<image>", images=["a.png"]), r"images\[0\]: no such file"),
    "no picture": (shown("<image>", images=[{"bytes": b"x"}]), r"images\[0\]: is text, not an image"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_conversation_is_named(name: str, tmp_path: Path) -> None:
    row, told = BAD[name]
    path = write_rows(tmp_path / "sft.jsonl", [turns("user", "assistant"), row])
    with pytest.raises(ValueError, match=f"^sft.jsonl row 1: {told}"):
        load_transcripts([str(path)], images_root="")


def test_a_picture_with_broken_pixels_is_named_when_it_is_shown(tmp_path: Path) -> None:
    whole = make_png(size=(400, 400))
    row = shown("<image>", images=[{"bytes": whole[:60] + bytes(40) + whole[100:]}])
    read = load_transcripts([str(write_rows(tmp_path / "sft.json", [turns("user", "assistant"), row]))], images_root="")
    assert said(read[0]) == [("user", "x"), ("assistant", "x")]
    with pytest.raises(ValueError, match=r"^sft.json row 1: images\[0\]: cannot be opened"):
        read[1]


def test_a_reply_that_only_thinks_is_named(tmp_path: Path) -> None:
    thinks, masked = replied(content="<think>x</think> \n"), replied(content="<think>x</think>", loss=False)
    rows = [turns("user", "assistant"), thinks, replied(content="<think>x"), replied(content="<think>x</think>y")]
    (line,) = load_transcripts([str(write_rows(tmp_path / "sft.jsonl", rows))], images_root="").warnings
    assert line.startswith(
        "sft.jsonl row 1: 2 of 4 conversations have a response without text after its <think>, and this response is trained on: add"
    )
    two = {"messages": [*masked["messages"], *turns("user", "assistant")["messages"]]}
    assert load_transcripts([str(write_rows(tmp_path / "masked.jsonl", [two]))], images_root="").warnings == []
