"""The recorder, read back: choice by hand, pixels by equality, text that must survive, and a folder that can be moved."""

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as pil

from megatron_rl.observe.recorder import Recorder, read
from megatron_rl.types import Context, End, Image, Rollout, Status, ToolCall, Turn


def picture(seed: int, *, width: int = 56, height: int = 28) -> Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    key = hashlib.sha256(pixels.tobytes()).hexdigest()[:32]
    return Image(picture=pil.fromarray(pixels), patch_PC=torch.zeros(8, 1176), grid=(1, height // 14, width // 14), key=key)


def rollout(sample: int, reward: float | None, *, group: int = 0, images: tuple[Image, ...] = (), text: str = "+") -> Rollout:
    context = Context()
    context.extend([1, 2, 3], images=images)
    context.extend([4, 5], logprobs=[-0.5, -1.5])
    return Rollout(
        task="number_line", example_id="1-4", group=group, sample=sample, weight_version=7, contexts=[context],
        turns=[Turn(context=0, span=(3, 5), text=text, reward=reward)],
        status=Status.FAILED if reward is None else Status.COMPLETED,
        reason="engine down" if reward is None else "goal", reward=reward, rewards={} if reward is None else {"return": reward},
    )  # fmt: skip


def recorded(run_dir: Path, step: int) -> list[tuple[str, int]]:
    return [(record.kind, record.sample) for record in read(run_dir / "rollouts" / f"step_{step:06d}.jsonl")]


def test_best_and_worst_are_chosen_by_reward_and_failed_ones_are_only_counted(tmp_path: Path):
    rewards = [0.0, None, 2.0, -1.0, 2.0, None, 0.5]
    Recorder(tmp_path, best=2, worst=1).record(3, [rollout(sample, reward) for sample, reward in enumerate(rewards)])
    records = read(tmp_path / "rollouts" / "step_000003.jsonl")
    assert [(record.kind, record.sample, record.reward) for record in records] == [("best", 2, 2.0), ("best", 4, 2.0), ("worst", 3, -1.0)]
    assert {(record.step, record.num_rollouts, record.num_failed) for record in records} == {(3, 7, 2)}


@pytest.mark.parametrize(
    ("best", "worst", "num", "expected"),
    [
        (1, 1, 1, [("best", 0)]),
        (2, 2, 3, [("best", 2), ("best", 1), ("worst", 0)]),
        (0, 2, 3, [("worst", 0), ("worst", 1)]),
        (1, 0, 3, [("best", 2)]),
    ],
)
def test_no_rollout_is_written_twice(tmp_path: Path, best: int, worst: int, num: int, expected: list[tuple[str, int]]):
    Recorder(tmp_path, best=best, worst=worst).record(0, [rollout(sample, float(sample)) for sample in range(num)])
    assert recorded(tmp_path, 0) == expected


def test_nothing_scored_or_nothing_wanted_leaves_no_file(tmp_path: Path):
    Recorder(tmp_path, best=1, worst=1).record(0, [rollout(0, None)])
    Recorder(tmp_path, best=1, worst=1).record(1, [])
    Recorder(tmp_path, best=0, worst=0).record(2, [rollout(0, 1.0)])
    assert list(tmp_path.rglob("*")) == []


def test_everything_people_read_comes_back(tmp_path: Path):
    image = picture(0)
    text = 'thoughts: "\u00e9\u4e2d\U0001f600"\n{"action": "+"}\u2028'
    source = rollout(4, 0.75, group=2, images=(image,), text=text)
    source.status, source.reason, source.rewards = Status.TRUNCATED, "turn limit", {"return": 0.75, "bonus": math.inf}
    source.end, source.outcome = End.MAX_TURNS, -0.5
    source.turns[0].score, source.turns[0].images = 0.25, [image]
    source.turns[0].call = ToolCall(tool="move", source="+", text="moved")
    Recorder(tmp_path, best=1, worst=0).record(12, [source])
    (record,) = read(tmp_path / "rollouts" / "step_000012.jsonl")
    (turn,) = record.turns
    call = {"tool": "move", "source": "+", "text": "moved", "error": "", "ran": True}
    assert (turn.context, turn.span, turn.text, turn.reward, turn.score, turn.call) == (0, (3, 5), text, 0.75, 0.25, call)
    assert turn.images == record.contexts[0].images
    for name in ("task", "example_id", "group", "sample", "weight_version", "status", "end", "reason", "reward", "outcome", "rewards"):
        assert getattr(record, name) == getattr(source, name), name
    (context,) = record.contexts
    assert (context.num_tokens, context.num_sampled) == (5, 2)
    assert np.array_equal(np.asarray(pil.open(tmp_path / context.images[0])), np.asarray(image.picture))


def test_equal_images_are_stored_once_over_rollouts_and_steps(tmp_path: Path):
    shared, other = picture(1), picture(2)
    recorder = Recorder(tmp_path, best=1, worst=1)
    recorder.record(0, [rollout(0, 1.0, images=(shared, other)), rollout(1, 0.0, images=(shared,))])
    files = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "rollouts" / "images").iterdir()}
    assert files.keys() == {f"{shared.key}.png", f"{other.key}.png"}
    recorder.record(1, [rollout(0, 1.0, images=(other,))])
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "rollouts" / "images").iterdir()} == files


def test_the_run_folder_can_be_moved(tmp_path: Path):
    image = picture(3)
    Recorder(tmp_path / "here", best=1, worst=0).record(0, [rollout(0, 1.0, images=(image,))])
    (tmp_path / "here").rename(tmp_path / "there")
    path = tmp_path / "there" / "rollouts" / "step_000000.jsonl"
    assert str(tmp_path) not in path.read_text()
    ((name,),) = (context.images for context in read(path)[0].contexts)
    assert np.array_equal(np.asarray(pil.open(path.parents[1] / name)), np.asarray(image.picture))


def test_lines_are_strict_json(tmp_path: Path):
    Recorder(tmp_path, best=1, worst=0).record(0, [rollout(0, math.nan)])
    (line,) = (tmp_path / "rollouts" / "step_000000.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=lambda name: pytest.fail(name))["reward"] == "NaN"
    assert math.isnan(read(tmp_path / "rollouts" / "step_000000.jsonl")[0].reward)


def test_a_restart_forgets_later_steps_and_writes_them_again(tmp_path: Path):
    first = Recorder(tmp_path, best=1, worst=0)
    for step in range(4):
        first.record(step, [rollout(0, 1.0)])
    Recorder(tmp_path, best=1, worst=0, start_step=2).record(2, [rollout(5, 1.0)])
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == [f"step_{step:06d}.jsonl" for step in range(3)]
    assert recorded(tmp_path, 1) == [("best", 0)] and recorded(tmp_path, 2) == [("best", 5)]
