"""Reports on prompts at the start of a run. Oracle: the prompts that the renderer builds from every
question.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.config import DataSettings, EngineSettings, ModelSettings, RunSettings, Settings, TaskSettings
from megatron_rl.data.questions import load_questions
from megatron_rl.preflight.prompts import report_blanked_tokens, report_column_warnings, report_prompts
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.tasks.vqa import VqaTask
from tests.support.data_files import make_png, write_rows
from tests.support.scripted_rollout_manager import EPISODE, ScriptedEngine, make_rollout_manager
from tests.support.single_process_policy import single_process_world

ROWS = [
    {"question": "Which color?", "answer": "red", "images": [{"bytes": make_png(size=(56, 56))}]},
    {"question": "Which color is it, " + "really, " * 40 + "then?", "answer": "red", "images": [{"bytes": make_png(size=(56, 56))}]},
    {"question": "Or these?", "answer": "red", "images": [{"bytes": make_png(size=(56, 56))}] * 3},
]


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model)))


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with single_process_world():
        yield


def settings_of(path: Path, *, room: int, max_failed: float) -> Settings:
    return Settings(
        engine=EngineSettings(max_images=2, max_model_len=room + 1),
        task=TaskSettings(name="vqa", max_new_tokens=10, data=DataSettings(train=[str(path)], eval=[str(path)])),
        run=RunSettings(dir="nowhere", max_failed_fraction=max_failed),
    )


def test_what_is_told(renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has the first prompt, with the image replaced by its size, and the row numbers of
    the two questions that do not fit. If the limit is raised by one token, one of them fits.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = write_rows(tmp_path / "mine.jsonl", ROWS)
    fleet = make_rollout_manager(renderer)
    fleet.task = VqaTask(settings_of(path, room=99, max_failed=0.9).task)
    unbounded = replace(EPISODE, max_turns=1, max_sequence_tokens=999, max_images=9)
    (rollout,) = fleet.run_examples(fleet.task.examples("train")[1:2], num_samples=1, settings=unbounded)
    longest = sum(1 - mask for mask in rollout.sequences[0].loss_mask)

    def told(**changes: float) -> list[str]:
        lines: list[str] = []
        report_prompts(settings_of(path, **changes), rollout_manager=fleet, log=lines.append)
        return lines

    first, *lines = told(room=longest - 1, max_failed=0.9)
    assert first.startswith("first prompt, ") and "56]" in first and "Which color?" in first and "</answer>" in first
    assert lines[0].startswith("warning: task.data.train: mine.jsonl row 1: ") and "leave no room for a response" in lines[0]
    assert lines[1] == "warning: task.data.train: mine.jsonl row 2: 3 images; raise engine.max_images=2"
    assert [line.replace("eval", "train") for line in lines[2:]] == lines[:2]
    assert len(told(room=longest, max_failed=0.9)) == 3, "now it fits, to the token"
    with pytest.raises(
        ValueError, match=r"^task.data.train=\['.*mine.jsonl'\]: 2 of 3 prompts do not fit, run.max_failed_fraction=0.5; .*row 1"
    ):
        told(room=longest - 1, max_failed=0.5)


def test_a_task_without_files_shows_its_prompt_and_followers_say_nothing(renderer: Renderer, tmp_path: Path) -> None:
    """For a task without data files, only the first prompt is reported, and only by the engine's
    leading rank.
    """
    lines: list[str] = []
    settings = settings_of(tmp_path, room=99, max_failed=0.1)
    report_prompts(settings, rollout_manager=make_rollout_manager(renderer), log=lines.append)
    assert len(lines) == 1 and lines[0].endswith("assistant") and "user\n    0" in lines[0]
    report_prompts(settings, rollout_manager=make_rollout_manager(renderer, ScriptedEngine(is_leader=False)), log=lines.append)
    assert len(lines) == 1


def test_questions_that_name_special_tokens_are_counted(renderer: Renderer, tmp_path: Path) -> None:
    """Questions that contain special tokens, whose text is changed, are counted in a warning."""
    rows = [{**ROWS[0], "question": words} for words in ("Where is <|box_start|>?", "Where?", "Which <|quad_end|>?")]
    questions = {"train": VqaTask(settings_of(write_rows(tmp_path / "mine.jsonl", rows), room=99, max_failed=0.9).task).examples("train")}
    lines: list[str] = []
    report_blanked_tokens(questions, rollout_manager=make_rollout_manager(renderer), log=lines.append)
    told = "2 questions contain special tokens, shown to the policy as '< |box_start|>'"
    assert lines == [f"warning: task.data.train: {told}; task.data.allow_grounding_tokens=true keeps grounding tokens"]


def test_columns_that_are_not_read_are_named_at_the_start(tmp_path: Path) -> None:
    """Unread columns are reported for every split that is loaded from files, including slices as
    `task.data.max_eval` creates them. A split of other examples is not reported.
    """
    row = {"question": "?", "answer": "a", "weight": 0}
    train = load_questions([str(write_rows(tmp_path / "q.jsonl", [row] * 3))], images_root="", name="train")
    lines: list[str] = []
    report_column_warnings({"train": train, "eval": train[:1], "dealt": [train[0]]}, log=lines.append)
    assert [line.partition(": the policy")[0] for line in lines[::3]] == [
        "warning: task.data.train: 0 images in 3 rows", "warning: task.data.eval: 0 images in 3 rows",
    ]  # fmt: skip
    weighed = "q.jsonl: column weight weights or masks the loss and is not read: all rows have equal weight"
    assert [line.partition(",")[0] for line in lines[1::3]] == [f"warning: task.data.{split}: {weighed}" for split in ("train", "eval")]
    assert [line.partition(" not read")[0] for line in lines[2::3]] == [
        f"warning: task.data.{split}: q.jsonl row 0: column weight is" for split in ("train", "eval")
    ]
