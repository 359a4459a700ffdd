"""Tests the transcript formats and loss flags of other trainers. Oracles: messages by hand, the
same conversation in every format, and the colors of generated images.
"""

import json
import tempfile
from pathlib import Path

import pytest

from megatron_rl.data.transcripts import load_transcripts, survey_transcripts
from tests.support.data_files import make_png, write_rows
from tests.support.transcripts import REPLY, SHAREGPT_MESSAGES, USER, load_conversation, reply_pair_row, user_row


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write Arrow copies to a folder of the test."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cache"))


PLAIN = [("user", "Which?"), ("assistant", "Red.")]
SHOWN = [("user", "RED", "\nWhich?"), ("assistant", "Red.")]
OF_SYSTEM = [("system", "See."), *PLAIN]
HALF = [("user", "Which?"), ("MASKED", "bad"), ("user", "Which?"), ("assistant", "Red.")]
IMAGE = {"type": "image"}
WHICH = {"type": "text", "text": "Which?"}
READ = {
    # formats
    "messages of OpenAI": ({"messages": [USER, REPLY]}, PLAIN),
    "messages in conversations": ({"conversations": [USER, REPLY]}, PLAIN),
    "from and value in messages": ({"messages": SHAREGPT_MESSAGES}, PLAIN),
    "conversation": ({"conversation": SHAREGPT_MESSAGES}, PLAIN),
    "a list as text": ({"messages": json.dumps([USER, REPLY])}, PLAIN),
    "pictures as text": ({"images": "['red.png']", "messages": [USER, REPLY]}, SHOWN),
    "export/sft_transcripts.py": (
        {
            "messages": [USER, REPLY],
            "id": "train/3",
            "source": "",
            "question": "Describe cat.png",
            "answer": "cat.png",
            "step": 3,
            "reward": 1.0,
        },
        PLAIN,
    ),
    "a picture and other names of it": (
        {"image": "red.png", "file_name": "red.png", "link": "http://a.b/c.jpg", "original": "IMG_1.jpg", "messages": [USER, REPLY]},
        SHOWN,
    ),
    "a picture and where it comes from": ({"image": "red.png", "image_url": "http://a.b/c.jpg", "messages": [USER, REPLY]}, SHOWN),
    "alpaca": ({"instruction": "Which?", "input": "", "output": "Red."}, PLAIN),
    "alpaca with input": (
        {"instruction": "Which?", "input": "Red or blue", "output": "Red."},
        [("user", "Which?\nRed or blue"), ("assistant", "Red.")],
    ),
    "alpaca with history": (
        {"instruction": "c", "output": "d", "history": [["a", "b"]], "system": "See."},
        [("system", "See."), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")],
    ),
    "query and response": ({"query": "Which?", "response": "Red.", "history": []}, PLAIN),
    "query and history": (
        {"query": "c", "response": "d", "history": [["a", "b"]]},
        [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")],
    ),
    "prompt and completion of TRL": ({"prompt": [USER], "completion": [REPLY]}, PLAIN),
    "a reply in TRL's prompt is not learned": (
        {"prompt": [USER, {"role": "assistant", "content": "bad"}, USER], "completion": [REPLY]},
        HALF,
    ),
    "a flag in TRL's prompt": (
        {"prompt": [USER, REPLY | {"loss": True}, USER], "completion": [REPLY]},
        PLAIN + PLAIN,
    ),
    "messages beside a prompt": ({"prompt": "Which?", "prompt_id": "7", "messages": [USER, REPLY]}, PLAIN),
    "system": ({"system": "See.", "conversations": SHAREGPT_MESSAGES}, OF_SYSTEM),
    "system_prompt of ms-swift": ({"system_prompt": "See.", "query": "Which?", "response": "Red."}, OF_SYSTEM),
    "columns without effect": (
        {
            "id": "a.png",
            "source": "http://x/a.png",
            "lang": "en",
            "score": 0.5,
            "turns": [1, 2],
            "num_images": 0,
            "messages": [USER, REPLY],
        },
        PLAIN,
    ),
    "keys without effect": ({"messages": [USER | {"id": 1, "timestamp": "now"}, REPLY | {"tool_calls": [], "prefix": False}]}, PLAIN),
    "the name of a tool": (
        {"messages": [USER, REPLY, {"role": "tool", "name": "crop", "tool_call_id": "1", "content": ""}, REPLY]},
        [*PLAIN, ("tool",), ("assistant", "Red.")],
    ),
    # loss flags
    "loss": (reply_pair_row(loss=False), HALF),
    "weight of OpenAI": (reply_pair_row(weight=0), HALF),
    "trainable": (reply_pair_row(trainable=False), HALF),
    "train": (reply_pair_row(train=False), HALF),
    "loss_mask": (reply_pair_row(loss_mask=0), HALF),
    "loss_scale of ms-swift": (reply_pair_row(loss_scale=0.0), HALF),
    "two flags that agree": (reply_pair_row(loss=False, weight=0), HALF),
    "a flag that is true": (reply_pair_row(loss=True), [("user", "Which?"), ("assistant", "bad"), *PLAIN]),
    "conversations of AgentGym": (
        {
            "conversations": [
                SHAREGPT_MESSAGES[0] | {"loss": None},
                SHAREGPT_MESSAGES[1] | {"loss": False},
                SHAREGPT_MESSAGES[0],
                SHAREGPT_MESSAGES[1] | {"loss": True},
            ]
        },
        [PLAIN[0], ("MASKED", "Red."), *PLAIN],
    ),
    "a masked reply that says nothing": (
        {"messages": [USER, REPLY | {"content": "", "loss": 0}, USER, REPLY]},
        [PLAIN[0], ("MASKED",), *PLAIN],
    ),
    "a user that is not learned": ({"messages": [USER | {"loss": 0}, REPLY | {"loss": 1}]}, PLAIN),
    "a row that is learned": ({"weight": 1, "messages": [USER, REPLY]}, PLAIN),
    # images
    "Qwen's script": (
        {"image": "red.png", "conversations": [SHAREGPT_MESSAGES[0] | {"value": "<image>\nWhich?"}, SHAREGPT_MESSAGES[1]]},
        SHOWN,
    ),
    "Qwen's script, a list": (
        {
            "image": ["red.png", "blue.png"],
            "conversations": [SHAREGPT_MESSAGES[0] | {"value": "<image>\n<image>\nWhich?"}, SHAREGPT_MESSAGES[1]],
        },
        [("user", "RED", "\n", "BLUE", "\nWhich?"), PLAIN[1]],
    ),
    "no place": ({"image": "red.png", "conversations": SHAREGPT_MESSAGES}, SHOWN),
    "image_path without a place": ({"image_path": "red.png", "conversations": SHAREGPT_MESSAGES}, SHOWN),
    "file_name of imagefolder": ({"file_name": "red.png", "messages": [USER, REPLY]}, SHOWN),
    "file_name of something else": ({"file_name": "part 1", "messages": [USER, REPLY]}, PLAIN),
    "LLaMA-Factory's old form": (
        {"images": ["red.png", "blue.png"], "messages": [{"role": "system", "content": "See."}, USER, REPLY, USER, REPLY]},
        [("system", "See."), ("user", "RED", "\n", "BLUE", "\nWhich?"), PLAIN[1], *PLAIN],
    ),
    "no place, parts": ({"images": ["red.png"], "messages": [{"role": "user", "content": [WHICH]}, REPLY]}, SHOWN),
    "no place, no words": (
        {"images": ["red.png"], "messages": [{"role": "user", "content": ""}, REPLY]},
        [("user", "RED", "\n"), PLAIN[1]],
    ),
    "alpaca's pictures": ({"images": ["red.png"], "instruction": "<image>\nWhich?", "output": "Red."}, SHOWN),
    "TRL's pictures": ({"images": ["red.png"], "prompt": [USER], "completion": [REPLY]}, SHOWN),
    "TRL's places": (
        {"images": ["red.png"], "prompt": [{"role": "user", "content": [IMAGE, WHICH]}], "completion": [REPLY]},
        [("user", "RED", "Which?"), PLAIN[1]],
    ),
    "parts and places take pictures in turn": (
        {
            "images": ["red.png", "blue.png"],
            "messages": [{"role": "user", "content": [IMAGE, WHICH]}, REPLY, {"role": "tool", "content": "<image>"}, REPLY],
        },
        [("user", "RED", "Which?"), PLAIN[1], ("tool", "BLUE"), PLAIN[1]],
    ),
    "a part with path": (
        {"messages": [{"role": "user", "content": [IMAGE | {"path": "red.png"}, WHICH]}, REPLY]},
        [("user", "RED", "Which?"), PLAIN[1]],
    ),
    "words that only look like places": (
        {
            "messages": [
                {"role": "user", "content": "<video controls> &lt;audio>"},
                {"role": "assistant", "content": "<bbox>1,2</bbox> <point>3</point>"},
            ]
        },
        [("user", "<video controls> &lt;audio>"), ("assistant", "<bbox>1,2</bbox> <point>3</point>")],
    ),
}


@pytest.mark.parametrize("name", READ)
def test_a_form_is_read(name: str, tmp_path: Path) -> None:
    row, expected = READ[name]
    assert load_conversation(tmp_path, row) == expected


@pytest.mark.parametrize(
    "name", ["loss", "weight of OpenAI", "loss_scale of ms-swift", "alpaca with history", "Qwen's script", "TRL's pictures"]
)
def test_a_form_is_read_alike_from_parquet(name: str, tmp_path: Path) -> None:
    """All messages of a Parquet column have the same keys, and a missing key is null. The
    messages are read as from JSON.
    """
    row, expected = READ[name]
    assert load_conversation(tmp_path, row, suffix=".parquet") == expected


def test_mistakes_are_told_once_a_kind(tmp_path: Path) -> None:
    rows = [user_row("<video>"), user_row("x", weight=0), *[{"messages": [USER, REPLY | {"mood": number}]} for number in range(5)]]
    path = str(write_rows(tmp_path / "t.jsonl", rows))
    with pytest.raises(ValueError, match=r"^t.jsonl row 0: .* \(and 6 rows with other errors; launch/doctor.py lists them\)$"):
        load_transcripts([path], images_root="")
    alike = str(write_rows(tmp_path / "alike.jsonl", rows[2:]))
    with pytest.raises(ValueError, match=r"^alike.jsonl row 0: messages\[1\].mood: .* \(in all 5 rows\)$"):
        load_transcripts([alike], images_root="")
    mixed = str(write_rows(tmp_path / "mixed.jsonl", [reply_pair_row(loss=False), *rows[2:4]]))
    with pytest.raises(ValueError, match=r"^mixed.jsonl row 1: .* \(in 2 of 3 rows\)$"):
        load_transcripts([mixed], images_root="")


def test_a_survey_counts_what_is_learned(tmp_path: Path) -> None:
    rows = [reply_pair_row(loss=False) | {"images": [{"bytes": make_png()}]}, {"messages": [USER, REPLY]}]
    found = survey_transcripts(load_transcripts([str(write_rows(tmp_path / "t.parquet", rows))], images_root=""))
    assert (found.num_rows, found.num_images, found.num_replies, found.num_masked, found.errors) == (2, 1, 3, 1, [])
