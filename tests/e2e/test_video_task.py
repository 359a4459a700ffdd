"""Questions about videos that only the policy's code can read, from the user's files to the score,
in a real sandbox. The oracle is the color of each frame.
"""

import json
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from megatron_rl.config import DataSettings, ModelSettings, TaskSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.tasks.visual_python.clip import Clip
from megatron_rl.tasks.visual_python.pyvision import PyVisionProtocol
from megatron_rl.tasks.visual_python.task import VisualPythonTask
from megatron_rl.tasks.vqa import VqaTask
from megatron_rl.types import Example, Image, Status, StopReason
from tests.e2e.test_visual_python_task import Said, color_of, play, task_of

NUM_FRAMES, RED, GREEN = 200, (220, 20, 20), (20, 200, 20)
LATE = 150
"""Index of the first of ten red frames; all other frames are green."""


def make_clip(path: Path, color_at: Callable[[int], tuple[int, int, int]], *, num: int = NUM_FRAMES, codec: str = "mp4v") -> Path:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*codec), 25, (64, 48))
    assert writer.isOpened()
    for number in range(num):
        writer.write(np.full((48, 64, 3), color_at(number)[::-1], np.uint8))
    writer.release()
    return path


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=3136))


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    make_clip(folder / "clip.mp4", lambda number: RED if LATE <= number < LATE + 10 else GREEN)
    row = {
        "data_source": "mine", "env_name": "pyvision_gym_wo_video_hint", "mm_hint": {"hint_type": "video", "hint_path": "clip.mp4"},
        "reward_model": {"ground_truth": "red"}, "extra_info": {"question": "<video> What color is frame 155?", "answer": "red"},
    }  # fmt: skip
    (folder / "q.jsonl").write_text(json.dumps(row) + "\n")
    return folder / "q.jsonl"


def test_code_fetches_the_frames_that_the_policy_sees(questions: Path, renderer: Renderer) -> None:
    """The prompt contains no frame of the video. The policy's code fetches a frame, which is
    returned as an observation, and the policy answers with its color.

    A policy that fetches another frame answers incorrectly. A policy that requests a frame past the
    end receives an IndexError as its observation and can retry.
    """

    def looks_at(number: int) -> Callable[[Example], Said]:
        def policy(example: Example) -> Said:
            def said(text: str, images: list[Image]) -> str:
                if images:
                    return protocol.write_answer(color_of(images[-1]))
                assert "[video_clue_0] What color" in text and "video_clue_0.get_avg_fps()" in text
                wanted = number if "IndexError" not in text else LATE
                return protocol.write_code(f"Image.fromarray(video_clue_0[{wanted}].asnumpy()).show()\nprint(video_clue_0)")

            return said

        return policy

    protocol = PyVisionProtocol(num_videos=1)
    played = play(task_of(questions), renderer, looks_at(LATE + 5), looks_at(LATE - 1), looks_at(NUM_FRAMES))
    right, wrong, mended = (rollouts[0] for rollouts in played)
    assert [rollout.reward for rollout in (right, wrong, mended)] == [1.0, 0.0, 1.0]
    assert right.sequences[0].images and "a video of 200 frames, 25.00 a second" in right.turns[0].tool_call.text
    assert "IndexError" in mended.turns[0].tool_call.error and mended.status is Status.COMPLETED and mended.stop_reason is StopReason.DONE


def test_gold_earns_full_marks(questions: Path, renderer: Renderer) -> None:
    """The task's gold responses earn the full reward of 1.1."""
    task = task_of(questions, reward="pyvision")

    def gold(example: Example) -> Said:
        replies = iter(task.gold_replies(example))
        return lambda *_: next(replies)

    ((rollout,),) = play(task, renderer, gold)
    assert rollout.reward == pytest.approx(1.1) and rollout.used_tool


def test_what_cannot_be_decoded_is_ours(questions: Path, renderer: Renderer, tmp_path: Path) -> None:
    """A file with the header of a video but undecodable content fails its episodes permanently, and
    the reason names the row.
    """
    (tmp_path / "clip.mp4").write_bytes((questions.parent / "clip.mp4").read_bytes()[:16] + b"x" * 4000)
    (tmp_path / "q.jsonl").write_text(questions.read_text())

    def policy(_: Example) -> Said:
        return lambda *_: PyVisionProtocol().write_code("print(1)")

    ((rollout,),) = play(task_of(tmp_path / "q.jsonl"), renderer, policy)
    assert rollout.status is Status.FAILED and rollout.reward is None
    assert "q.jsonl row 0" in rollout.reason and "is not a video that OpenCV can decode" in rollout.reason


@pytest.mark.parametrize(("codec", "suffix"), [("mp4v", ".mp4"), ("MJPG", ".avi"), ("VP80", ".webm")])
def test_frames_are_those_that_were_written(codec: str, suffix: str, tmp_path: Path) -> None:
    """`Clip` returns the frame that was written at each index, in any access order: forwards, far
    back, from the end and in a batch. Each frame has its own gray level.
    """
    clip = Clip(str(make_clip(tmp_path / f"a{suffix}", lambda number: (number, 255 - number, 128), codec=codec)))
    assert len(clip) == NUM_FRAMES and clip.get_avg_fps() == pytest.approx(25)
    order = [0, 1, 150, 151, 149, 3, *np.random.default_rng(0).integers(0, NUM_FRAMES, 40).tolist(), NUM_FRAMES - 1]
    for number in order:
        red, green, _ = clip[number].asnumpy().reshape(-1, 3).mean(axis=0)
        assert (red - green + 255) / 2 == pytest.approx(number, abs=1.6), number
    assert np.array_equal(clip[-1].asnumpy(), clip[NUM_FRAMES - 1].asnumpy())
    batch = clip.get_batch([7, 5]).asnumpy()
    assert batch.shape == (2, 48, 64, 3) and np.array_equal(batch[1], clip[5].asnumpy())
    with pytest.raises(IndexError):
        clip[NUM_FRAMES]


@pytest.mark.parametrize(
    ("hint", "said"),
    [
        (
            {"hint_type": "video", "hint_path": "none.mp4"},
            r"mm_hint.hint_path: no video .*none.mp4; the file must exist, with one of the suffixes .mp4",
        ),
        (
            {"hint_type": "video", "hint_path": "q.jsonl"},
            r"mm_hint.hint_path: no video .*q.jsonl; the file must exist, with one of the suffixes .mp4",
        ),
        (
            {"hint_type": "video", "hint_path": "words.mp4"},
            r"mm_hint.hint_path: .*words.mp4 is not an MP4, Matroska, WebM or AVI file",
        ),
        ({"hint_type": "video", "hint_path": "../away/clip.mp4"}, r"mm_hint.hint_path: .* is outside of "),
        ({"hint_type": "video", "hint_path": 3}, r"mm_hint.hint_path: must be the path of a video, not int"),
        ({"hint_type": "video"}, r"mm_hint.hint_path: must be the path of a video, not NoneType"),
        ({"hint_type": "sound", "hint_path": "clip.mp4"}, r"mm_hint: hint_type must be image \(or video"),
    ],
)
def test_a_bad_video_is_one_line(hint: dict, said: str, tmp_path: Path) -> None:
    """An invalid video path or hint raises a one-line ValueError that names the row and the
    field.
    """
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    make_clip(away / "clip.mp4", lambda _: RED, num=3)
    (home / "words.mp4").write_text("no video at all, but words")
    (home / "q.jsonl").write_text(json.dumps({"question": "?", "answer": "red", "mm_hint": hint}) + "\n")
    with pytest.raises(ValueError, match=rf"^q.jsonl row 0: {said}"):
        task_of(home / "q.jsonl").examples("train")


def test_only_code_sees_videos(questions: Path) -> None:
    """Other tasks and protocols reject rows with a video before anything starts."""
    data = DataSettings(train=[str(questions)], eval=[str(questions)])
    for task in (
        VqaTask(TaskSettings(name="vqa", data=data)),
        VisualPythonTask(TaskSettings(name="visual_python", tool_format="codev", data=data)),
    ):
        with pytest.raises(ValueError, match=r"^task.data.train=.*q.jsonl row 0 contains a video, which is available only to the code of"):
            task.examples("train")


def test_places_of_videos_are_named() -> None:
    """<video> placeholders are replaced by the names of the videos.

    If their number does not match, all names are put before the question.
    """
    two = PyVisionProtocol(num_videos=2)
    asked = [
        two.write_prompt(question, [])[1]["content"][0]["text"]
        for question in ("Is <video> or <video> longer?", "Which?", "Is <video> red?")
    ]
    assert asked == [
        "Is [video_clue_0] or [video_clue_1] longer?",
        "[video_clue_0]\n[video_clue_1]\nWhich?",
        "[video_clue_0]\n[video_clue_1]\nIs  red?",
    ]
