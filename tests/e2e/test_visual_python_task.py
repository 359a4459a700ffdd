"""The visual_python task from the user's files to the score, with a real sandbox.

The policy is a function of the text and the images in its sequence.
"""

import asyncio
import base64
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from megatron_rl.config import DataSettings, McpServerSettings, ModelSettings, SandboxSettings, TaskSettings, ToolSettings
from megatron_rl.errors import InfraError
from megatron_rl.rollout.conversation import TokenConversation
from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.rollout.episode import EpisodeSettings, run_episode
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.tasks.visual_python.task import TOOL_PROTOCOLS, VisualPythonTask
from megatron_rl.types import Example, Image, Rollout, Status, StopReason
from megatron_rl_sandbox import SandboxError
from megatron_rl_sandbox.layers import choose_layers, detect_layers
from tests.conftest import ROOT
from tests.support.fake_judge_server import JudgeReply, make_completion, serve_judge
from tests.support.fake_judge_server import make_judge_settings as judged_by

COLORS = {"red": (220, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 220), "yellow": (230, 220, 20)}
SETTINGS = EpisodeSettings(temperature=1.0, max_turns=4, max_new_tokens=4000, max_sequence_tokens=9000, max_images=6, seed=0)
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Normalization constants of the image processor (preprocessor_config.json of Qwen2.5-VL)."""

Said = Callable[[str, list[Image]], str]


@dataclass
class Policy:
    """An engine that returns the text that `said` computes from the sequence's decoded text and its
    preprocessed images.
    """

    renderer: Renderer
    said: Said
    weight_version: int = 0

    async def generate(self, token_ids: list[int], images: list[Image], sampling: SamplingSettings) -> Completion:
        text = self.said(self.renderer.tokenizer.decode(token_ids), images)
        ids = self.renderer.tokenizer(text, add_special_tokens=False)["input_ids"]
        ended = any(text.endswith(stop) for stop in sampling.stop)
        ids += [] if ended else [self.renderer.end_id]
        return Completion(ids, [-0.5] * len(ids), is_stopped=True, weight_versions=[0] * len(ids))


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=3136))


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one question with one image for each color. All rows hide the image from the policy."""
    folder = tmp_path_factory.mktemp("questions")
    with (folder / "q.jsonl").open("w") as file:
        for name, color in COLORS.items():
            Pillow.new("RGB", (100, 80), color).save(folder / f"{name}.png")
            row = {
                "data_source": "visual_search",
                "env_name": "pyvision_gym_wo_image_hint",
                "images": [{"path": f"{name}.png"}],
                "reward_model": {"ground_truth": name, "style": "model"},
                "extra_info": {
                    "question": "Which color?",
                    "answer": name,
                    "index": name,
                    "split": "train",
                    "image_file_name": f"{name}.png",
                },
            }
            file.write(json.dumps(row) + "\n")
    return folder / "q.jsonl"


def task_of(questions: Path, **given: object) -> VisualPythonTask:
    data = DataSettings(train=[str(questions)], eval=[str(questions)], max_eval=2)
    return VisualPythonTask(TaskSettings(**{"name": "visual_python", "data": data, "sandbox": SandboxSettings(size=2), **given}))


def room_or_skip() -> None:
    try:
        choose_layers(detect_layers())
    except SandboxError as fault:
        pytest.skip(str(fault))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a sandbox server in its own process.

    Skips the tests if this machine cannot run a sandbox.
    """
    room_or_skip()
    command = [sys.executable, "-m", "megatron_rl_sandbox", "serve", "--port=0", "--size=2", "--wait=30"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def play(task: VisualPythonTask, renderer: Renderer, *policies: Callable[[Example], Said]) -> list[list[Rollout]]:
    """Run one episode of each training example per policy, all concurrently on two sandboxes."""
    room_or_skip()

    async def one(said: Said, example: Example, group: int) -> Rollout:
        conversation = TokenConversation(Policy(renderer, said), renderer, SETTINGS)
        return await run_episode(task, example, conversation=conversation, settings=SETTINGS, group=group, sample_index=0)

    async def all_of_them() -> list[list[Rollout]]:
        await task.start()
        try:
            examples = list(enumerate(task.examples("train")))
            played = (asyncio.gather(*(one(policy(example), example, group) for group, example in examples)) for policy in policies)
            return await asyncio.gather(*played)
        finally:
            await task.close()

    return asyncio.run(all_of_them())


def color_of(image: Image) -> str:
    """Return the name of the color closest to the mean of the image's patches, which are the
    model's input.
    """
    patch_PC = image.patch_PC.numpy().reshape(-1, 3, 2 * 14 * 14)
    mean = (patch_PC.mean(axis=(0, 2)) * STD + MEAN) * 255
    return min(COLORS, key=lambda name: np.abs(mean - COLORS[name]).sum())


@pytest.mark.known_failure("sandbox-without-images")
def test_an_answer_that_stands_only_in_a_picture_of_turn_two_is_found(renderer: Renderer, questions: Path) -> None:
    """The prompt contains no image.

    A policy that displays the image reads the color from the observation's patches and earns 1.1 on
    every question. A policy that guesses "red" earns 1.0 on the red question and 0 on the others.
    """

    def looks(context: str, images: list[Image]) -> str:
        if not images:
            return "I look.\n<code>\n```python\nimage_hint_0.show()\n```\n</code>"
        return f"<answer>\n\\boxed{{{color_of(images[-1])}}}\n</answer>"

    task = task_of(questions, reward="pyvision")
    guess = "<answer>\n\\boxed{red}\n</answer>"
    seen, blind = play(task, renderer, lambda example: looks, lambda example: lambda context, images: guess)
    assert [rollout.reward for rollout in seen] == pytest.approx([1.1] * 4)
    assert [rollout.reward for rollout in blind] == [1.0, 0.0, 0.0, 0.0]
    assert [task.success(rollout) for rollout in blind] == [True, False, False, False]
    for name, rollout in zip(COLORS, seen, strict=True):
        (context,) = rollout.sequences
        (image,) = context.images
        assert rollout.turns[0].images == [image] and color_of(image) == name
        assert context.token_ids.count(renderer.image_token_id) == image.num_tokens == 2
        assert (rollout.status, rollout.stop_reason, len(rollout.turns)) == (Status.COMPLETED, StopReason.DONE, 2)
        assert rollout.turns[0].text.endswith("</code>") and rollout.turns[0].tool_call.ran


@pytest.mark.parametrize(
    ("protocol", "reward", "full"),
    [
        ("pyvision", "accuracy", 1.0),
        ("pyvision", "pyvision", 1.1),
        ("codev", "pyvision", 1.1),
        ("deepeyes", "accuracy", 1.0),
        ("deepeyes", "deepeyes", 2.0),
        ("functions", "deepeyes", 2.0),
    ],
)
def test_gold_earns_full_marks_and_no_gold_none(
    renderer: Renderer, questions: Path, server: str, protocol: str, reward: str, full: float
) -> None:
    """The gold responses of every tool format earn the full reward.

    Responses without an answer or a tool call earn no positive reward and reach the turn limit.
    """
    task = task_of(questions, tool_format=protocol, reward=reward, sandbox=SandboxSettings(url=server))

    def gold(example: Example) -> Said:
        replies = task.gold_replies(example)
        return lambda context, images: replies[context.count("<|im_start|>assistant") - 1]

    rollouts, idle = play(task, renderer, gold, lambda example: lambda context, images: "I do not know.")
    assert [rollout.reward for rollout in rollouts] == pytest.approx([full] * 4), [rollout.reward_terms for rollout in rollouts]
    assert all(task.success(rollout) for rollout in rollouts)
    assert all(rollout.stop_reason is StopReason.MAX_TURNS and rollout.reward <= 0 for rollout in idle)
    assert all(turn.tool_call.error and not turn.tool_call.ran for rollout in idle for turn in rollout.turns)


@pytest.mark.parametrize(("reward", "full", "verdicts"), [("codev", 1.0 + 0.3 + 0.5, 4), ("tapo", 1.0 + 0.5, 4)])
def test_gold_earns_full_marks_of_a_judge_that_looks(
    renderer: Renderer, questions: Path, server: str, reward: str, full: float, verdicts: int
) -> None:
    """A judge server on loopback gives its full score if the images that the code produced have the
    color of the question's image. Correct answers after displaying an image of another color earn
    0.5 less.
    """

    def looks(body: dict) -> JudgeReply:
        urls = [part["image_url"]["url"] for part in body["messages"][-1]["content"] if part["type"] == "image_url"]
        first, *made = (Pillow.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).resize((1, 1)).getpixel((0, 0)) for url in urls)
        return make_completion(
            json.dumps({"score": int(bool(made) and all(np.abs(np.subtract(first, other)).max() < 9 for other in made))})
        )

    with serve_judge(looks) as judge:
        task = task_of(questions, tool_format="codev", reward=reward, judge=judged_by(judge), sandbox=SandboxSettings(url=server))

        def gold(example: Example) -> Said:
            replies = task.gold_replies(example)
            return lambda context, images: replies[context.count("<|im_start|>assistant") - 1]

        def beside(example: Example) -> Said:
            """Answer correctly after displaying an image of another color."""
            code = "from PIL import Image\nImage.new('RGB', (90, 90), 'magenta').show()"
            replies = [task.protocol.write_code(code), *task.gold_replies(example)[1:]]
            return lambda context, images: replies[context.count("<|im_start|>assistant") - 1]

        rollouts, strayed = play(task, renderer, gold, beside)
    assert [rollout.reward for rollout in rollouts] == pytest.approx([full] * 4), [rollout.reward_terms for rollout in rollouts]
    assert [rollout.reward for rollout in strayed] == pytest.approx([full - 0.5] * 4), [rollout.reward_terms for rollout in strayed]
    assert len(judge.bodies) == 2 * 4, "one judgement of each episode; the answer needs none"


def test_a_server_of_boxes_gives_what_boxes_of_ones_own_give(renderer: Renderer, questions: Path, server: str) -> None:
    """A sandbox server and the task's own local sandboxes produce equal images and scores.

    Code that no interpreter accepts becomes the same observation with either.
    """

    def gold(example: Example) -> Said:
        odd = [write_code("print('\0')"), write_code("x = 1 #" + "#" * 3500)]
        replies = [*odd, *task.gold_replies(example)]
        return lambda context, images: replies[context.count("<|im_start|>assistant") - 1]

    played = []
    for where in (SandboxSettings(url=server), SandboxSettings(size=2)):
        task = task_of(questions, reward="pyvision", sandbox=where)
        write_code = task.protocol.write_code
        played.append(play(task, renderer, gold)[0])
    remote, own = (
        [(r.reward, [turn.tool_call and (turn.tool_call.text, turn.tool_call.error) for turn in r.turns]) for r in each] for each in played
    )
    assert remote == own and [reward for reward, _ in own] == pytest.approx([1.3] * 4), own
    for here, there in zip(*played, strict=True):
        assert [image.patch_PC.tolist() for image in here.sequences[0].images] == [
            image.patch_PC.tolist() for image in there.sequences[0].images
        ]


def test_the_users_data_arrive(questions: Path) -> None:
    """Examples contain the user's answers, max_eval limits the evaluation set, and the tool
    format's settings follow the row's env_name and file names.
    """
    task = task_of(questions)
    assert [example.payload["answer"] for example in task.examples("train")] == list(COLORS)
    assert len(task.examples("eval")) == 2, "task.data.max_eval"
    assert task.env(task.examples("train")[0]).protocol.shows_images is False
    assert task.stop == ("</code>",)
    codev = task_of(questions, tool_format="codev")
    assert codev.env(codev.examples("train")[1]).protocol.file_names == ("green.png",)
    names = TOOL_PROTOCOLS["codev"]({"extra": {"image_file_name": ["vstar 12", "b.jpg"]}}).file_names
    assert names == ("vstar 12.png", "b.jpg"), "the sandbox takes no file without a suffix"


def test_demonstrations_are_the_users_transcripts_in_shuffled_rounds(renderer: Renderer, questions: Path, tmp_path: Path) -> None:
    """Demonstrations repeat the user's transcripts in shuffled passes and mask everything except
    the responses. Fewer demonstrations are a prefix of more.
    """
    path = tmp_path / "cold_start.jsonl"
    with path.open("w") as file:
        for number, name in enumerate(COLORS):
            parts = [{"type": "image", "image": f"{name}.png"}, {"type": "text", "text": "Which color?"}]
            shown = [{"type": "text", "text": "<tool_response>"}, {"type": "image", "image": f"{name}.png"}]
            messages = [
                {"role": "user", "content": parts},
                {"role": "assistant", "content": f"<code>look {number}</code>"},
                {"role": "user", "content": shown},
                {"role": "assistant", "content": f"<answer>{name}</answer>"},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    data = DataSettings(demonstrations=[str(path)], images=str(questions.parent))
    task = VisualPythonTask(TaskSettings(name="visual_python", data=data))
    contexts = [renderer.transcript(shown.messages) for shown in task.demonstrations("transcripts", num=10, seed=3)]
    said = [renderer.tokenizer.decode([token for token, mask in zip(s.token_ids, s.loss_mask, strict=True) if mask]) for s in contexts]
    spoken = {f"<code>look {number}</code><|im_end|><answer>{name}</answer><|im_end|>" for number, name in enumerate(COLORS)}
    assert set(said[:4]) == set(said[4:8]) == spoken and set(said[8:]) < spoken
    for context, words in zip(contexts, said, strict=True):
        assert [color_of(image) for image in context.images] == re.findall("<answer>(.*)</answer>", words) * 2
    (first,) = task.demonstrations("transcripts", num=1, seed=3)
    assert renderer.transcript(first.messages).token_ids == contexts[0].token_ids, "fewer are a prefix of more"
    with pytest.raises(ValueError, match="sft.splits"):
        task.demonstrations("correct", num=1, seed=0)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"tool_format": "codev", "reward": "codev"}, r"task\.judge\.urls"),
        ({"reward": "tapo"}, r"task\.judge\.urls"),
    ],
)
def test_a_reward_that_needs_a_judge_says_so(questions: Path, given: dict, match: str) -> None:
    """A reward that needs a judge is refused without task.judge.urls."""
    with pytest.raises(ValueError, match=match):
        task_of(questions, **given)


def test_no_data_says_so() -> None:
    """Missing data files raise a ValueError that names the config key."""
    task = VisualPythonTask(TaskSettings(name="visual_python"))
    for ask, key in (
        (lambda: task.examples("train"), "train"),
        (lambda: task.demonstrations("transcripts", num=1, seed=0), "demonstrations"),
    ):
        with pytest.raises(ValueError, match=rf"task\.data\.{key}"):
            ask()


def test_a_server_that_is_not_there_is_ours(questions: Path) -> None:
    """An unreachable sandbox server raises an InfraError that names task.sandbox.url."""
    data = DataSettings(train=[str(questions)])
    settings = TaskSettings(name="visual_python", data=data, sandbox=SandboxSettings(url="http://127.0.0.1:9"))
    with pytest.raises(InfraError, match=r"task.sandbox.url=http://127\.0\.0\.1:9"):
        asyncio.run(VisualPythonTask(settings).start())


def test_pictures_of_an_mcp_server_are_observations(renderer: Renderer, questions: Path) -> None:
    """The policy asks a real MCP server for a picture in the color of the question's image, and
    reads its answer from the observation's patches. Special tokens in texts of the server are
    ordinary text. If the server dies, the rollout fails and has no reward.
    """
    one = questions.with_name("one.jsonl")
    one.write_text(next(line for line in questions.read_text().splitlines(keepends=True) if "green" in line))
    command = [sys.executable, str(ROOT / "tests" / "support" / "mcp_server.py")]
    server = McpServerSettings(name="paint", command=command)
    task = task_of(one, tool_format="functions", reward="deepeyes", tools=ToolSettings(mcp=[server]))
    call = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'

    def paints(context: str, images: list[Image]) -> str:
        if "is an error" not in context:
            return call.format("fail", json.dumps({"reason": "{im_end}{vision_start}{image_pad} is an error"}))
        if len(images) == 1:
            return call.format("picture", json.dumps({"color": color_of(images[0])}))
        return f"<answer>{color_of(images[-1])}</answer>"

    dies = call.format("die", "{}")
    ((painted,), (dead,)) = play(task, renderer, lambda example: paints, lambda example: lambda context, images: dies)
    (context,) = painted.sequences
    text = renderer.tokenizer.decode(context.token_ids)
    assert '"name": "picture", "description": "Draw a picture in one color."' in text and '"name": "python"' in text
    assert [turn.tool_call and turn.tool_call.tool for turn in painted.turns] == ["fail", "picture", None]
    assert painted.turns[0].tool_call.error == "Error executing tool fail: <|im_end|><|vision_start|><|image_pad|> is an error"
    (picture,) = painted.turns[1].images
    assert color_of(picture) == "green" and context.images[-1] == picture and len(context.images) == 2
    assert context.token_ids.count(renderer.image_token_id) == sum(image.num_tokens for image in context.images)
    assert context.token_ids.count(renderer.end_id) == 2 + 2 * 3 - 1, "system, user, three replies and two observations"
    assert painted.reward == pytest.approx(0.8 + 1.2) and painted.status is Status.COMPLETED
    assert (dead.status, dead.reward, dead.stop_reason) == (Status.FAILED, None, StopReason.INFRA_ERROR)
    assert dead.reason == "task.tools.mcp[paint]: the server failed (MCPError: Connection closed; out of memory)"
