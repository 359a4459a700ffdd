"""A training run and an evaluation on questions about videos: SFT, then GRPO, with real vLLM, a
real sandbox, and video files that this test writes.

Three oracles are used: the frames of the videos, decoded by the test; the run's own evaluation; and
a separate vLLM server with the same weights, queried over HTTP.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as pil

from megatron_rl.config import ModelSettings
from megatron_rl.io.jsonl import read_lines
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.recorder import read_recorded
from megatron_rl.observe.rollout_store import read_rollouts, step_path
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.tasks.visual_python.clip import Clip
from megatron_rl.tasks.visual_python.pyvision import PyVisionProtocol
from megatron_rl.types import Rollout, ToolCall
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import ROOT
from tests.e2e.test_video_task import GREEN, LATE, RED, make_clip
from tests.e2e.test_visual_python_task import room_or_skip
from tests.support.vllm_servers import serve_openai

pytestmark = pytest.mark.long
TRAIN, EVALUATE = ROOT / "launch" / "train.py", ROOT / "launch" / "evaluate.py"
COLORS = {"red": RED, "green": GREEN}
SHOWN = LATE + 5
CODE = f"Image.fromarray(video_clue_0[{SHOWN}].asnumpy()).show()"
QUESTION = f"<video> What color is frame {SHOWN}?"
PROTOCOL = PyVisionProtocol(num_videos=1)
PIXELS = {"min_pixels": 3136, "max_pixels": 3136}


@dataclass(frozen=True, slots=True)
class Finished:
    home: Path
    words: tuple[str, ...]
    """Overrides shared by all stages."""

    @property
    def run(self) -> Path:
        return self.home / "grpo"

    def recorded(self, step: int) -> list[Rollout]:
        return read_rollouts(step_path(self.run / "rollouts", step))


def write_data(home: Path) -> None:
    """Write two videos that differ in the queried frames, one question about each, and one
    demonstration for each.
    """
    questions, shown = [], []
    for name, color in COLORS.items():
        other = next(each for each in COLORS.values() if each != color)
        clip = make_clip(home / f"{name}.mp4", lambda number: color if LATE <= number < LATE + 10 else other)  # noqa: B023
        pil.fromarray(Clip(str(clip))[SHOWN].asnumpy()).save(home / f"{name}.png")
        hint = {"hint_type": "video", "hint_path": clip.name}
        questions.append({"question": QUESTION, "answer": name, "mm_hint": hint, "env_name": "pyvision_gym_wo_video_hint"})
        seen = PROTOCOL.write_observation(ToolCall(tool="python", source=CODE), [pil.new("RGB", (28, 28))], num_previous_images=0)
        for part in seen[0]["content"]:
            if part["type"] == "image":
                part["image"] = f"{name}.png"
        replies = [{"role": "assistant", "content": said} for said in (PROTOCOL.write_code(CODE), PROTOCOL.write_answer(name))]
        shown.append({"messages": [*PROTOCOL.write_prompt(QUESTION, []), replies[0], *seen, replies[1]]})
    for file, rows in (("questions", questions), ("demonstrations", shown)):
        (home / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [part["text"] for row in shown for message in row["messages"] if message["role"] != "assistant" for part in message["content"]
             if part["type"] == "text"]  # fmt: skip
    (home / "words.txt").write_text("\n".join([*words, CODE, PROTOCOL.write_code(CODE), *map(PROTOCOL.write_answer, COLORS)]) + "\n")


@pytest.fixture(scope="module")
def finished(torchrun, tmp_path_factory: pytest.TempPathFactory) -> Finished:  # noqa: ANN001
    """Run SFT, which teaches the output format, then two GRPO steps whose rollouts are all
    recorded.
    """
    room_or_skip()
    home = tmp_path_factory.mktemp("video")
    write_data(home)
    make_checkpoint(home / "nano", preset="nano", seed=0, words=home / "words.txt")
    words = (
        "task=visual_python", f"task.data.train=[{home}/questions.jsonl]", f"task.data.eval=[{home}/questions.jsonl]",
        f"task.data.demonstrations=[{home}/demonstrations.jsonl]", "task.reward=pyvision", "task.max_turns=3",
        "task.max_new_tokens=60", "task.sandbox.size=2", "task.eval_samples=0", "engine.kv_cache_mib=32", "engine.max_model_len=1024",
        *(f"model.{name}={value}" for name, value in PIXELS.items()),
    )  # fmt: skip
    warm = ("stage=sft", "sft.splits=[transcripts]", "sft.steps=[40]", "sft.batch_size=4", "sft.num_demonstrations=8", "optim.lr=3e-3")
    torchrun(1, TRAIN, *words, *warm, f"model.path={home}/nano", f"run.dir={home}/sft", timeout_s=400)
    steps = ("run.steps=2", "batch.prompts_per_step=2", "batch.group_size=4", "rollouts.save=all", "optim.lr=1e-4")
    torchrun(1, TRAIN, *words, *steps, f"model.path={home}/sft/final", f"run.dir={home}/grpo", timeout_s=400)
    return Finished(home, words)


def test_the_record_holds_frames_where_code_fetched_them(finished: Finished) -> None:
    """The prompt names the video but contains no image.

    Every image in a sequence comes from a tool call and equals the video's frame at the requested
    index.
    """
    renderer, num_fetched = Renderer(ModelSettings(path=str(finished.home / "nano"), **PIXELS)), 0
    names = {f"train/{number}": name for number, name in enumerate(COLORS)}
    for rollout in [*finished.recorded(0), *finished.recorded(1)]:
        (context,) = rollout.sequences
        prompt = renderer.tokenizer.decode(context.token_ids[: rollout.turns[0].token_span[0]])
        assert f"[video_clue_0] What color is frame {SHOWN}?" in prompt and "video_clue_0.get_avg_fps()" in prompt
        assert renderer.image_token_id not in context.token_ids[: rollout.turns[0].token_span[0]]
        assert context.images == [image for turn in rollout.turns for image in turn.images]
        for turn in rollout.turns:
            if not turn.images:
                continue
            asked = re.findall(r"video_clue_0\[(\d+)\]", turn.tool_call.source)
            assert turn.tool_call.ran and not turn.tool_call.error and len(asked) == len(turn.images) == 1
            clip = Clip(str(finished.home / f"{names[rollout.example_id]}.mp4"))
            frame = renderer.image(pil.fromarray(clip[int(asked[0])].asnumpy()))
            assert np.array_equal(np.asarray(turn.images[0].pil), np.asarray(frame.pil))
            num_fetched += 1
    assert num_fetched >= 4, "a warm start that fetches nothing shows nothing"


def test_frames_are_trained_on_and_paid_for(finished: Finished) -> None:
    """Engine and trainer logprobs differ by less than 1e-4 on sequences with frames, and the
    rewards equal the reward rule recomputed by the test.
    """
    steps = [line for line in read_metrics(finished.run / "metrics.jsonl") if "reward/mean" in line]
    assert len(steps) == 2
    for number, line in enumerate(steps):
        played = finished.recorded(number)
        assert len(played) == 8 and line["rollout_mismatch/logprob_abs_diff_max"] < 1e-4 and line["rollout/failed_fraction"] == 0
        for rollout in played:
            used = sum(turn.tool_call is not None and turn.tool_call.ran for turn in rollout.turns)
            assert rollout.reward == pytest.approx(rollout.reward_terms["accuracy"] * (1 + 0.1 * used)), rollout.turns
        assert line["reward/mean"] == pytest.approx(np.mean([rollout.reward for rollout in played]))


def test_an_evaluation_gives_the_runs_own_figures(finished: Finished, torchrun) -> None:  # noqa: ANN001
    """A separate evaluation of the final model reproduces the scores of the run's own evaluation.

    A separate vLLM server, which receives the frames as PNG over HTTP, returns the same responses
    and scores.
    """
    out = finished.home / "alone"
    torchrun(1, EVALUATE, *finished.words, f"model.path={finished.run}/final", f"run.dir={out}", timeout_s=240)
    found, own = (json.loads(path.read_text()) for path in (out / "evaluation.json", finished.run / "eval.json"))
    told = {f"greedy_{name}": value for name, value in found["scores"].items()}
    shared = told.keys() & own.keys()
    assert {"greedy_success", "greedy_tool_use", "greedy_return"} <= shared
    assert {name: told[name] for name in shared} == {name: pytest.approx(own[name]) for name in shared}
    assert found["scores"]["tool_use"] == 1.0
    lines = read_lines(out / "examples.jsonl")
    assert all(f"video_clue_0[{SHOWN}]" in line["responses"][0][0] for line in lines)
    with serve_openai(finished.run / "final", pixels=tuple(PIXELS.values())) as url:
        given = (f"model.path={finished.run}/final", f"evaluation.urls=[{url}]", f"run.dir={finished.home}/far")
        torchrun(1, EVALUATE, *finished.words, *given, timeout_s=240)
    assert read_lines(finished.home / "far" / "examples.jsonl") == lines
    far, near = (read_recorded(finished.home / name / "rollouts" / "step_000000.jsonl") for name in ("far", "alone"))
    frames = [[[image.key for image in turn.images] for entry in each for turn in entry.rollout.turns] for each in (far, near)]
    assert frames[0] == frames[1] and any(frames[0])
