"""Supervised training of task vqa: reference answers as demonstrations, and transcripts with
other prompts than the task.
"""

import asyncio
import json
from pathlib import Path

import pytest
from PIL import Image

from megatron_rl.config import DataSettings, SftSettings, TaskSettings
from megatron_rl.sft import prompt_warnings
from megatron_rl.tasks.gym_cards.task import NumberLineTask
from megatron_rl.tasks.vqa import ANSWER, VqaTask
from megatron_rl.types import Demonstration

ROWS = [{"question": f"<image>What is {number} + 1?", "answer": str(number + 1), "image": f"{number}.png"} for number in range(5)]


def make_task(folder: Path, **data: object) -> VqaTask:
    for number in range(5):
        Image.new("RGB", (28, 28), (40 * number, 0, 0)).save(folder / f"{number}.png")
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return VqaTask(TaskSettings(name="vqa", data=DataSettings(train=[str(file)], eval=[str(file)], **data)))


def test_answers_are_replies_to_the_prompts_of_the_episodes(tmp_path: Path) -> None:
    """Each demonstration is the prompt of an episode, followed by the reference answer as it must
    be written. The seed shuffles the questions.
    """
    task = make_task(tmp_path)
    shown = task.demonstrations("answers", num=4, seed=3)
    assert len(shown) == 4 and task.default_demonstration_split() == "answers"
    by_prompt = {}
    for example in task.examples("train"):
        prompt = asyncio.run(task.env(example).reset(0))
        text = prompt[-1]["content"][-1]["text"]
        assert text.endswith(ANSWER) and prompt[-1]["content"][0]["image"].getpixel((0, 0)) == (40 * int(text.split()[2]), 0, 0)
        by_prompt[text] = str(example.payload["answer"])
    for each in shown:
        *prompt, reply = each.messages
        text = prompt[-1]["content"][-1]["text"]
        assert reply == {"role": "assistant", "content": [{"type": "text", "text": f"<answer>{by_prompt[text]}</answer>"}]}
    orders = {tuple(each.where for each in task.demonstrations("answers", num=9, seed=seed)) for seed in range(6)}
    assert len(orders) > 1 and all(len(set(order)) == 5 for order in orders)


def test_the_only_split_is_the_default(tmp_path: Path) -> None:
    """With transcripts, they are the default. A task with several splits names them."""
    assert make_task(tmp_path, demonstrations=["t.jsonl"]).default_demonstration_split() == "transcripts"
    with pytest.raises(ValueError, match=r"^sft.splits=\[\]: choose from the task's splits, correct, biased: 'sft.splits=\[correct\]' "):
        NumberLineTask(TaskSettings(name="number_line")).default_demonstration_split()
    assert SftSettings().splits == [] and len(SftSettings().steps) == 1
    with pytest.raises(ValueError, match=r"^sft.steps=\[3, 4\]: must contain one number for each split"):
        SftSettings(steps=[3, 4])


def test_transcripts_without_the_answer_instructions_are_reported(tmp_path: Path) -> None:
    """A transcript without the text that the task appends to a question would train another prompt
    than the policy gets. Transcripts with the text, and those of games, are not reported.
    """
    task = make_task(tmp_path)

    def transcript(question: object, number: int) -> Demonstration:
        return Demonstration([{"role": "user", "content": question}, {"role": "assistant", "content": "4"}], where=f"t.jsonl row {number}")

    good = [transcript(f"How many?{ANSWER}", 0), transcript([{"type": "image"}, {"type": "text", "text": f"How many?{ANSWER}\n"}], 1)]
    bad = transcript([{"type": "image"}, {"type": "text", "text": "How many?"}], 2)
    assert prompt_warnings(task, good) == [] and prompt_warnings(NumberLineTask(TaskSettings(name="number_line")), [bad]) == []
    (line,) = prompt_warnings(task, [*good, bad])
    assert line == (
        "1 of the first 3 transcripts have other prompts than task vqa gives the policy; t.jsonl row 2: the question ends with "
        f"'How many?'; the task ends it with {ANSWER.strip()[-60:]!r}"
    )
