"""Tests which fields of an example are recorded with its rollouts: texts and JSON, never images or
bytes. The expected values are written by hand.
"""

import json
from pathlib import Path

import pytest
from PIL import Image as pil

from megatron_rl.config import DataSettings, TaskSettings
from megatron_rl.rollout.example_fields import MAX_CHARACTERS, example_fields
from megatron_rl.tasks.gym_cards.task import NumberLineTask
from megatron_rl.tasks.vqa import VqaTask


@pytest.mark.parametrize(
    ("payload", "question", "answer", "extra"),
    [
        ({"question": "How many?", "answer": "4", "extra": {"index": 7}}, "How many?", "4", {"index": 7}),
        ({"question": "How many?", "answer": 4.5}, "How many?", "4.5", None),
        ({"question": b"no text", "answer": ["a"], "extra": "no mapping"}, "", "", None),
        ({"extra": {"image": b"PNG", "picture": pil.new("RGB", (1, 1)), "set": {1}}}, "", "", None),
        ({"extra": {"boxes": [[1, 2], (3, b"x")], "more": {"deep": {"bytes": b"x"}, "ok": True, "none": None}}}, "", "",
         {"boxes": [[1, 2], [3]], "more": {"ok": True, "none": None}}),
        ({"extra": {1: "one", "nan": float("nan")}}, "", "", {"1": "one", "nan": "NaN"}),
        ({"extra": {"long": "a" * (MAX_CHARACTERS + 1)}}, "", "",
         {"long": "a" * MAX_CHARACTERS + f"... ({MAX_CHARACTERS + 1} characters)"}),
        ({}, "", "", None),
    ],
)  # fmt: skip
def test_texts_and_json(payload: dict, question: str, answer: str, extra: dict | None) -> None:
    found = example_fields(payload)
    assert (found["question"], found["answer"]) == (question, answer)
    assert (json.loads(found["extra"]) if found["extra"] else None) == extra


def test_what_is_nested_without_end_is_cut() -> None:
    endless: dict[str, object] = {}
    endless["again"] = endless
    assert example_fields({"extra": endless})["extra"].endswith('"again": "..."' + "}" * 17)


def test_fields_of_data_and_of_a_game(tmp_path: Path) -> None:
    """Columns that the task does not use are recorded in `extra`. An example of a game has no
    reference answer.
    """
    row = {"question": "2 + 2?", "answer": 4, "data_source": "sums", "difficulty": {"level": 3}}
    (tmp_path / "mine.jsonl").write_text(json.dumps(row) + "\n")
    paths = [str(tmp_path / "mine.jsonl")]
    (example,) = VqaTask(TaskSettings(name="vqa", data=DataSettings(train=paths, eval=paths))).examples("train")
    assert example_fields(example.payload) == {"question": "2 + 2?", "answer": "4", "extra": '{"difficulty": {"level": 3}}'}
    game = NumberLineTask(TaskSettings(name="number_line")).examples("train")[0]
    assert example_fields(game.payload) == {"question": "", "answer": "", "extra": ""}
