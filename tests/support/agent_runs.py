"""Runs of task=agent with vowel_agent.py, and the comparison of two such runs."""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from PIL import Image as pil
from safetensors.torch import load_file

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.rollout_store import read_rollouts, step_path
from megatron_rl.types import Rollout, Status
from tests.conftest import ROOT, SUPPORT
from tests.support import fork_server
from tests.support.comparable_metrics import drop_timings

TRAIN = ROOT / "launch" / "train.py"
AGENT = SUPPORT / "agents" / "vowel_agent.py"
NUM_STEPS = 3
NUM_EPISODES = 8
"""Number of episodes in a step."""
LIMIT_S = 280
NOT_COMPARED = ("rollout_mismatch/", "weight_sync/", "store/gb")
"""Prefixes of metrics that are rounding errors themselves, or timings and sizes."""
TOLERANCE = 1e-5
"""Requests of different episodes arrive in an order that varies, and so do the engine's batches and
the rounding errors of its logprobs. The sampled tokens are equal nevertheless.
"""


def write_questions(folder: Path) -> Path:
    """Write three questions with images and return their file."""
    for number, color in enumerate(("green", "yellow", "white")):
        pil.new("RGB", (56, 56), color).save(folder / f"{number}.png")
    rows = [{"question": f"<image>number {number}?", "answer": "x", "images": [f"{number}.png"]} for number in range(3)]
    (folder / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "q.jsonl"


def agent_overrides(questions: Path, model: Path, folder: Path, *arguments: object) -> tuple[str, ...]:
    """Return the settings of a run; `arguments` are those of the agent."""
    command = ",".join(map(str, (sys.executable, AGENT, *arguments)))
    return (
        "task=agent", f"task.options.command=[{command}]", "task.reward=reported", f"task.data.train=[{questions}]",
        f"task.data.eval=[{questions}]", "task.max_turns=8", "task.max_new_tokens=12", "model.min_pixels=3136", "model.max_pixels=4000",
        "engine.kv_cache_mib=32", "engine.max_model_len=1024", "batch.prompts_per_step=2", "batch.group_size=4", "optim.lr=1e-3",
        "optim.eps=1e-3", f"run.steps={NUM_STEPS}", "run.eval_every=0", "rollouts.save=all", f"model.path={model}", f"run.dir={folder}",
    )  # fmt: skip


def train(num_ranks: int, *overrides: str) -> str:
    """Run the training to its end and return its output."""
    result = fork_server.run_world(num_ranks, TRAIN, *overrides, timeout_s=LIMIT_S)
    assert result.returncode == 0, result.stdout[-6000:]
    return result.stdout


def kill_with_agents(num_ranks: int, *overrides: str, after: Path, temporary: Path) -> None:
    """Start a run and kill all its ranks once `after` exists and agents are running.

    Check that none of the processes that it started is left, and no agent's folder in `temporary`.
    """
    ranks = fork_server.start_world(num_ranks, TRAIN, *overrides, environment={"TMPDIR": str(temporary)})
    deadline = time.monotonic() + LIMIT_S
    started: list[psutil.Process] = []
    try:
        while not after.exists() or not any(str(AGENT) in command_of(process) for process in started):
            assert time.monotonic() < deadline and not any(rank.poll() for rank in ranks), ranks[0].output.read_text()[-6000:]
            started = [child for rank in ranks for child in psutil.Process(rank.pid).children(recursive=True)]
            time.sleep(0.01)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert psutil.wait_procs(started, timeout=60)[1] == []
    assert not list(temporary.glob("agent_*"))


def command_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process; empty if it has ended."""
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def rollouts_of(run: Path, step: int) -> list[Rollout]:
    return list(read_rollouts(step_path(run / "rollouts", step), with_images=False))


def check_logprobs(run: Path) -> None:
    """Check that engine and trainer logprobs differ by at most 1e-4 on every sampled token of every
    branch, in each step and for each token, and that every step changes the policy.
    """
    steps = read_metrics(run / "metrics.jsonl")[:-1]
    assert len(steps) == NUM_STEPS
    for number, step in enumerate(steps):
        assert step["rollout_mismatch/logprob_abs_diff_max"] <= 1e-4 and step["grad_norm"] > 0
        rollouts = rollouts_of(run, number)
        assert len(rollouts) == NUM_EPISODES and {each.status for each in rollouts} == {Status.COMPLETED}
        for sequence in (sequence for each in rollouts for sequence in each.sequences):
            sampled = [place for place, mask in enumerate(sequence.loss_mask) if mask]
            assert sampled and {sequence.weight_versions[place] for place in sampled} == {number}
            differences = [abs(sequence.rollout_logprobs[place] - sequence.old_logprobs[place]) for place in sampled]
            assert max(differences) <= 1e-4 and any(sequence.rollout_logprobs[place] for place in sampled)


def check_equal_runs(ours: Path, theirs: Path) -> None:
    """Check that two runs sampled the same tokens from the same requests, with equal logprobs,
    advantages, metrics and final weights.
    """
    for step in range(NUM_STEPS):
        left, right = rollouts_of(ours, step), rollouts_of(theirs, step)
        assert [without_numbers(each) for each in left] == [without_numbers(each) for each in right]
        for mine, other in zip(left, right, strict=True):
            for sequence, expected in zip(mine.sequences, other.sequences, strict=True):
                for column in ("rollout_logprobs", "advantages"):
                    assert getattr(sequence, column) == pytest.approx(getattr(expected, column), abs=TOLERANCE), column
    lines = [[drop_timings(line) for line in read_metrics(run / "metrics.jsonl")] for run in (ours, theirs)]
    check_equal_metrics(*lines)
    weights = [weights_of(run / "final") for run in (ours, theirs)]
    assert weights[0].keys() == weights[1].keys() and len(weights[0]) > 20
    for name, tensor in weights[0].items():
        assert float((tensor - weights[1][name]).abs().max()) <= TOLERANCE, name


def check_equal_metrics(ours: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]]) -> None:
    """Check that all metrics are equal within the tolerance, except NOT_COMPARED."""
    assert len(ours) == len(theirs) == NUM_STEPS + 1
    for line, expected in zip(ours, theirs, strict=True):
        names, others = ({name for name in each if not name.startswith(NOT_COMPARED)} for each in (line, expected))
        assert names == others
        for name in names:
            assert line[name] == pytest.approx(expected[name], rel=10 * TOLERANCE, abs=TOLERANCE), name


def without_numbers(rollout: Rollout) -> object:
    """Return what two equal runs have exactly equal: requests, tokens, images, versions, turns and
    reward.
    """
    sequences = [(each.token_ids, each.loss_mask, each.weight_versions, [image.key for image in each.images]) for each in rollout.sequences]
    turns = [(turn.sequence, turn.token_span, turn.text) for turn in rollout.turns]
    return (rollout.example_id, rollout.group, rollout.sample_index, rollout.reason, rollout.reward, sequences, turns)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
