"""Tests the task of plain questions. The oracles are hand-written messages, gold responses that
must earn full marks, and a policy with the same answer for every question."""

import asyncio
import tempfile
from pathlib import Path

import pytest

from megatron_rl.config import DataSettings, TaskSettings
from megatron_rl.errors import InfraError
from megatron_rl.tasks.gym_cards.task import NumberLineTask
from megatron_rl.tasks.visual_python.task import VisualPythonTask
from megatron_rl.tasks.vqa import ANSWER, VqaTask
from megatron_rl.types import Rollout, Turn
from tests.support.data_files import make_png, write_rows
from tests.support.rollout_factory import make_reward_input


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redirect Arrow copies to a folder of the test."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cache"))


ROWS = [
    {"question": "Is <image> or <image> red?", "answer": "the first", "images": [{"bytes": make_png("red")}, {"bytes": make_png("blue")}]},
    {"question": "2 + 2?", "answer": 4},
    {"question": "Half?", "answer": "\\frac{1}{2}"},
    {"question": "Which?", "answer": "B"},
]


def task_of(tmp_path: Path, **data: object) -> VqaTask:
    paths = [str(write_rows(tmp_path / "mine.parquet", ROWS[:1])), str(write_rows(tmp_path / "mine.jsonl", ROWS[1:]))]
    return VqaTask(TaskSettings(name="vqa", data=DataSettings(train=paths, eval=paths[1:], **data)))


def score(task: VqaTask, example: object, reply: str) -> float:
    outcome = make_reward_input(Turn(sequence=0, token_span=(0, 1), text=reply), payload=example.payload)
    return asyncio.run(task.rubric.score(outcome)).reward


def test_an_episode_is_one_prompt_and_one_reply(tmp_path: Path) -> None:
    task = task_of(tmp_path)

    async def play() -> tuple:
        env = task.env(task.examples("train")[0])
        prompt = await env.reset(3)
        step = await env.step("<answer>the first</answer>")
        await env.close()
        return prompt, step

    (message,), step = asyncio.run(play())
    parts = [part["text"] if part["type"] == "text" else part["image"].getpixel((0, 0)) for part in message["content"]]
    assert (message["role"], parts) == ("user", ["Is ", (255, 0, 0), " or ", (0, 0, 255), " red?" + ANSWER])
    assert step.done and step.messages == [] and step.tool_call is None


def test_the_words_around_a_question_are_settings(tmp_path: Path) -> None:
    """`task.prompt` adds text before and after a question. The system message is
    `task.system_prompt` or, without it, the row's own."""
    rows = [{"prompt": [{"role": "system", "content": "Row."}, {"role": "user", "content": "Why?"}], "answer": "x"}]
    path = str(write_rows(tmp_path / "mine.jsonl", rows))

    def asked(**words: str) -> list[tuple[str, str]]:
        task = VqaTask(TaskSettings(name="vqa", data=DataSettings(eval=[path]), **words))
        messages = asyncio.run(task.env(task.examples("eval")[0]).reset(0))
        return [(message["role"], "".join(part["text"] for part in message["content"])) for message in messages]

    assert asked() == [("system", "Row."), ("user", "Why?" + ANSWER)]
    assert asked(prompt="Q: {question} A:", system_prompt="Mine.") == [("system", "Mine."), ("user", "Q: Why? A:")]
    with pytest.raises(ValueError, match="^task.prompt=Answer!: must contain {question} exactly once"):
        TaskSettings(name="vqa", prompt="Answer!")
    for task, words in ((NumberLineTask, {"prompt": "{question}"}), (VisualPythonTask, {"system_prompt": "Be brief."})):
        (key,) = words
        with pytest.raises(ValueError, match=rf"^task.{key}=.*: task mine has fixed prompts; remove this setting, or use task=vqa"):
            task(TaskSettings(name="mine", max_turns=5, **words))


def test_gold_earns_full_marks_and_a_constant_does_not(tmp_path: Path) -> None:
    """Gold responses earn full marks. A constant response earns them only for the question it
    answers."""
    task = task_of(tmp_path)
    examples = task.examples("train")
    assert [score(task, example, *task.gold_replies(example)) for example in examples] == [1, 1, 1, 1]
    assert [score(task, example, "It is 4. <answer>4</answer>") for example in examples] == [0, 1, 0, 0]
    assert [score(task, example, "$\\boxed{0.5}$") for example in examples] == [0, 0, 1, 0]
    assert [score(task, example, "") for example in examples] == [0, 0, 0, 0]
    rollout = Rollout(task="vqa", example_id="", group=0, sample_index=0, reward_terms={"accuracy": 1.0})
    assert task.success(rollout)
    rollout.reward_terms["accuracy"] = 0.0
    assert not task.success(rollout)


def test_splits_are_read_once(tmp_path: Path) -> None:
    task = task_of(tmp_path, max_eval=2)
    assert [example.payload["answer"] for example in task.examples("eval")] == ["4", "\\frac{1}{2}"]
    (tmp_path / "mine.jsonl").unlink()
    assert len(task.examples("eval")) == 2


def test_a_picture_that_vanished_fails_the_episode(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(make_png())
    path = str(write_rows(tmp_path / "mine.json", [{"question": "?", "answer": "x", "image": "a.png"}]))
    (example,) = VqaTask(TaskSettings(name="vqa", data=DataSettings(eval=[path]))).examples("eval")
    (tmp_path / "a.png").unlink()
    with pytest.raises(InfraError, match=r"^mine.json row 0: image: cannot be opened"):
        asyncio.run(VqaTask(TaskSettings(name="vqa", data=DataSettings(eval=[path]))).env(example).reset(0))


def test_demonstrations_are_dealt_in_rounds(tmp_path: Path) -> None:
    """Demonstrations cycle through all transcripts before any repeats. Fewer of them with the same
    seed are a prefix of more."""
    talks = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": str(number)}]} for number in range(5)]
    task = task_of(tmp_path, demonstrations=[str(write_rows(tmp_path / "talks.jsonl", talks))])

    def dealt(num: int, seed: int) -> list[str]:
        return [shown.messages[-1]["content"][0]["text"] for shown in task.demonstrations("transcripts", num=num, seed=seed)]

    twelve = dealt(12, 0)
    assert dealt(7, 0) == twelve[:7] and dealt(12, 1) != twelve
    assert sorted(twelve[:5]) == sorted(twelve[5:10]) == list("01234") and len(set(twelve[10:])) == 2


def test_without_files_to_evaluate_on_it_does_not_start() -> None:
    with pytest.raises(ValueError, match=r"^task.data.eval=\[\]: set the files that contain the held-out questions"):
        VqaTask(TaskSettings(name="vqa"))


def test_demonstrations_need_files_and_have_one_split(tmp_path: Path) -> None:
    task = task_of(tmp_path)
    with pytest.raises(ValueError, match=r"^task.data.demonstrations=\[\]: set the transcript files"):
        task.demonstrations("transcripts", num=1, seed=0)
    with pytest.raises(
        ValueError, match=r"^sft.splits=correct: this task supports only transcript files: 'sft.splits=\[transcripts\]' 'sft.steps=\[N\]'"
    ):
        task.demonstrations("correct", num=1, seed=0)
