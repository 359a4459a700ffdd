"""An endpoint policy that calls tools: code runs in a real sandbox, and tool outputs return to the
endpoint as text and PNG images.

The endpoint is a strict HTTP server with scripted responses. The oracle is the same responses as
tokens through the renderer, as in training.
"""

import asyncio
import base64
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image as pil

from megatron_rl.config import DataSettings, ModelSettings, SandboxSettings, TaskSettings
from megatron_rl.observe.recorder import read_recorded
from megatron_rl.rollout.conversation import TokenConversation
from megatron_rl.rollout.episode import EpisodeSettings, run_episode
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.task import Task
from megatron_rl.tasks.visual_python.task import VisualPythonTask
from megatron_rl.tasks.visual_search.drawing import SearchScene
from megatron_rl.tasks.visual_search.task import VisualSearchTask, crop_box
from megatron_rl.types import Example, Rollout, StopReason
from tests.conftest import ROOT
from tests.e2e.test_visual_python_task import COLORS, Policy, room_or_skip
from tests.support import fork_server
from tests.support.fake_judge_server import JudgeReply, make_completion, serve_judge

PIXELS = {"min_pixels": 3136, "max_pixels": 20000}
LIMITS = EpisodeSettings(temperature=0.0, max_turns=3, max_new_tokens=4000, max_sequence_tokens=9000, max_images=6, seed=0)
SPEECH = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
PICTURE = re.compile(r"<\|vision_start\|>(<\|image_pad\|>)+<\|vision_end\|>")
Heard = tuple[str, str, list[bytes]]
"""A message: its role, its text, and the pixels of its images."""


def visual_search(_: Path) -> tuple[Task, list[str]]:
    settings = TaskSettings(
        name="visual_search", reward="pyvision", tool_format="pyvision", data=DataSettings(max_eval=4), sandbox=SandboxSettings(size=2)
    )
    return VisualSearchTask(settings), ["task=visual_search", "task.data.max_eval=4"]


def visual_python(folder: Path) -> tuple[Task, list[str]]:
    """Build the task with images that only code can access."""
    rows = []
    for name, color in COLORS.items():
        pil.new("RGB", (100, 80), color).save(folder / f"{name}.png")
        row = {"images": [{"path": f"{name}.png"}], "env_name": "pyvision_gym_wo_image_hint", "reward_model": {"ground_truth": name}}
        rows.append({**row, "extra_info": {"question": f"Which color? ({len(rows)})", "answer": name}})
    (folder / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSettings(train=[str(folder / "q.jsonl")], eval=[str(folder / "q.jsonl")])
    settings = TaskSettings(name="visual_python", reward="pyvision", data=data, sandbox=SandboxSettings(size=2))
    return VisualPythonTask(settings), ["task=visual_python", "task.reward=pyvision", f"task.data.eval=[{folder}/q.jsonl]"]


def replies_of(task: Task, number: int, example: Example) -> list[str]:
    """Return one of four scripts: look and answer; fix an error; show a figure and answer wrongly;
    or make no call, show two figures, and look until the turn limit."""
    code, figure = task.protocol.write_code, "Image.new('RGB', (70, 90), (0, {}, 9)).show()"
    look, answer = task.gold_replies(example)
    return [
        [look, answer],
        [code("print('before')\n1 / 0"), look, answer],
        [code(f"print('shown')\n{figure.format(200)}"), task.protocol.write_answer("nothing like it")],
        ["Hm.", code(f"{figure.format(20)}\n{figure.format(90)}"), look],
    ][number]


def played(task: Task, examples: list[Example], scripts: list[list[str]], renderer: Renderer) -> tuple[list[Rollout], list[list[Heard]]]:
    """Run the episodes with our engine's interface.

    Return the rollouts and all messages of each episode.
    """
    heard: list[list[Heard]] = [[] for _ in examples]

    def policy(number: int) -> Callable:
        def said(text: str, images: list) -> str:
            speeches, pictures = SPEECH.findall(text), iter(image.pil.tobytes() for image in images)
            heard[number] = [(who, PICTURE.sub("", words), [next(pictures) for _ in PICTURE.findall(words)]) for who, words in speeches]
            return scripts[number][sum(who == "assistant" for who, _ in speeches)]

        return said

    async def one(number: int, example: Example) -> Rollout:
        conversation = TokenConversation(Policy(renderer, policy(number)), renderer, LIMITS)
        return await run_episode(task, example, conversation=conversation, settings=LIMITS, group=number, sample_index=0)

    async def everyone() -> list[Rollout]:
        await task.start()
        try:
            return await asyncio.gather(*(one(number, example) for number, example in enumerate(examples)))
        finally:
            await task.close()

    return asyncio.run(everyone()), heard


def heard_of(message: dict) -> Heard:
    if isinstance(message["content"], str):
        return message["role"], message["content"], []
    words = "".join(part["text"] for part in message["content"] if part["type"] == "text")
    urls = [part["image_url"]["url"] for part in message["content"] if part["type"] == "image_url"]
    assert all(url.startswith("data:image/png;base64,") for url in urls)
    pictures = [pil.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]
    assert all(picture.format == "PNG" for picture in pictures)
    return message["role"], words, [picture.tobytes() for picture in pictures]


def told(rollout: Rollout) -> tuple:
    turns = [(turn.text, turn.tool_call, [image.key for image in turn.images]) for turn in rollout.turns]
    shown = [image.key for context in rollout.sequences for image in context.images]
    return (
        rollout.example_id,
        rollout.reward,
        rollout.reward_terms,
        rollout.outcome_reward,
        rollout.stop_reason,
        rollout.status,
        rollout.reason,
        turns,
        shown,
    )


@pytest.mark.parametrize("made", [visual_search, visual_python])
def test_tools_of_an_endpoint_are_those_of_our_engine(
    made: Callable[[Path], tuple[Task, list[str]]], random_model: Path, tmp_path: Path
) -> None:
    """Rollouts and messages of the endpoint equal those of our engine, with the pixels of every
    image. Sandboxed code raises, prints and shows figures."""
    room_or_skip()
    task, words = made(tmp_path)
    examples = list(task.examples("eval"))
    scripts = [replies_of(task, number, example) for number, example in enumerate(examples)]
    renderer = Renderer(ModelSettings(path=str(random_model), **PIXELS))
    own, heard = played(task, examples, scripts, renderer)
    far_heard: list[list[Heard]] = [[] for _ in examples]

    def behave(body: dict) -> JudgeReply:
        messages = [heard_of(message) for message in body["messages"]]
        (number,) = [number for number, known in enumerate(heard) if known[:2] == messages[:2]]
        far_heard[number] = messages
        return make_completion(scripts[number][sum(who == "assistant" for who, _, _ in messages)])

    limits = ("task.max_turns=3", "task.max_new_tokens=4000", *(f"model.{name}={value}" for name, value in PIXELS.items()))
    with serve_judge(behave) as server:
        given = (*words, *limits, "task.sandbox.size=2", "model.path=someone", f"evaluation.urls=[{server.url}]")
        result = fork_server.run_script(ROOT / "launch" / "evaluate.py", *given, f"run.dir={tmp_path}/out", timeout_s=120)
    assert result.returncode == 0, result.stdout
    far = [each.rollout for each in read_recorded(tmp_path / "out" / "rollouts" / "step_000000.jsonl")]
    assert [told(rollout) for rollout in far] == [told(rollout) for rollout in own]
    assert [rollout.stop_reason for rollout in far] == [StopReason.DONE, StopReason.DONE, StopReason.DONE, StopReason.MAX_TURNS]
    assert [rollout.reward for rollout in far[2:]] == [0.0, 0.0] and min(rollout.reward for rollout in far[:2]) > 1
    assert far_heard == heard, "words and pixels of every message that either was shown"
    assert "ZeroDivisionError" in heard[1][3][1] and "before" in heard[1][3][1] and not heard[1][3][2]
    assert len(heard[3][5][2]) == 2, "both pictures of one call"
    by_hand = pictures_by_hand(task, examples[0])
    shown = heard[0][3][2]
    assert shown == [renderer.image(by_hand).pil.tobytes()]


def pictures_by_hand(task: Task, example: Example) -> pil.Image:
    """Return the image of the first look, cropped from the cell by hand, or the original image for
    visual_python."""
    (stored,) = example.payload["images"]
    if isinstance(task, VisualPythonTask):
        return stored.open()
    scene: SearchScene = stored.scene
    return stored.open().crop(crop_box(scene.target.cell))
