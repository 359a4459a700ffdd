"""Tests the records of repeated steps: the run's own files contain each step once, and
RUN/superseded contains the rest, byte for byte.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_rl.config import AlgoSettings, Settings
from megatron_rl.distributed.world import connect, read_world
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.recorder import BestWorstRecorder, read_recorded
from megatron_rl.observe.rollout_store import RolloutStore, list_step_files, read_rollouts, step_path
from megatron_rl.run.checkpoints import list_checkpoints
from megatron_rl.run.directory import locked
from megatron_rl.run.superseded_steps import supersede_records
from tests.observe.test_recorder import picture, rollout
from tests.support.comparable_metrics import drop_timings
from tests.test_training_loop_scripted import live, settings_of

RESULTS, MODELS = ("eval.json", "prompts.jsonl"), ("final", "adapter")


@pytest.fixture
def world() -> Iterator[None]:
    connect(read_world(), timeout_s=30)
    yield
    dist.destroy_process_group()


def leave(folder: Path, *, num_steps: int, finished: bool = False) -> dict[str, bytes]:
    """Write the step records of a run with images; return the contents of all files, keyed by
    name.
    """
    recorder, bank = BestWorstRecorder(folder, num_best=1, num_worst=0), RolloutStore(folder, max_gb=1.0)
    for step in range(num_steps):
        rollouts = [rollout(sample, float(sample), images=(picture(sample + step),)) for sample in range(2)]
        recorder.record(step, rollouts)
        bank.record_step(step, rollouts, num_gen_batches=1)
    lines = [json.dumps({"step": step, "loss": step / 8}) for step in range(num_steps)]
    if finished:
        lines.append(json.dumps({"step": num_steps, "eval/greedy_success": 0.75, "time/total": 1.5}))
        (folder / "final").mkdir()
        for name in ("eval.json", "prompts.jsonl", "final/config.json"):
            (folder / name).write_text(f"of {name}")
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def supersede(folder: Path, first_step: int, *, num_steps: int) -> tuple[Path, int] | None:
    return supersede_records(
        folder, first_step=first_step, first_line=first_step, num_steps=num_steps, results=RESULTS, models=MODELS
    )  # fmt: skip


def test_after_a_kill_nothing_is_lost_and_each_step_is_there_once(tmp_path: Path) -> None:
    before = leave(tmp_path, num_steps=4)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed during this write
    assert supersede(tmp_path, 2, num_steps=9) == (tmp_path / "superseded" / "step_00000002", 2)
    superseded = tmp_path / "superseded" / "step_00000002"
    assert (tmp_path / "metrics.jsonl").read_bytes() + (superseded / "metrics.jsonl").read_bytes() == before["metrics.jsonl"]
    after, kept = contents(tmp_path), contents(superseded)
    for step, lies_in in ((0, after), (1, after), (2, kept), (3, kept)):
        for suffix in ("jsonl", "parquet"):
            name = f"rollouts/step_{step:06d}.{suffix}"
            assert lies_in[name] == before[name] and (name in after) != (name in kept)
    pictures = {name for name in before if name.endswith(".png")}
    assert all(after[name] == before[name] for name in pictures) and len(pictures) == 5
    assert {name for name in kept if name.endswith(".png")} == {f"rollouts/images/{picture(seed).key}.png" for seed in (2, 3, 4)}
    assert [entry.rollout.reward for entry in read_recorded(superseded / "rollouts" / "step_000003.jsonl")] == [1.0], "with its picture"
    assert len(read_rollouts(step_path(superseded / "rollouts", 2))) == 2
    assert RolloutStore(tmp_path, max_gb=1.0).metrics()["store/rollouts"] == 4.0 and len(list_step_files(tmp_path / "rollouts")) == 2


def test_a_second_kill_has_a_folder_of_its_own(tmp_path: Path) -> None:
    for name in ("step_00000002", "step_00000002.1", "step_00000002.2"):
        leave(tmp_path, num_steps=3)
        assert supersede(tmp_path, 2, num_steps=9) == (tmp_path / "superseded" / name, 1)
    assert supersede(tmp_path, 2, num_steps=9) is None, "nothing is done again"
    assert len(list((tmp_path / "superseded").iterdir())) == 3


def test_a_longer_run_keeps_the_evaluation_that_ended_the_shorter_one(tmp_path: Path) -> None:
    """When a finished run is extended, its final evaluation is added to the line of its last step,
    like a periodic evaluation. The model stays until a newer model replaces it.
    """
    before = leave(tmp_path, num_steps=3, finished=True)
    assert supersede(tmp_path, 3, num_steps=5) == (tmp_path / "superseded" / "step_00000003", 0)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[2] == {"step": 2, "loss": 0.25, "eval/greedy_success": 0.75} and "eval/greedy_success" not in lines[1]
    kept = contents(tmp_path / "superseded" / "step_00000003")
    assert kept["eval.json"] == before["eval.json"] and kept["prompts.jsonl"] == before["prompts.jsonl"]
    assert not (tmp_path / "eval.json").exists() and (tmp_path / "final" / "config.json").exists()
    assert kept["metrics.jsonl"] == before["metrics.jsonl"].splitlines(keepends=True)[-1]


def test_a_run_that_was_killed_before_it_was_marked_as_finished_ends_as_it_would_have(tmp_path: Path) -> None:
    """The line of the final evaluation is removed, so that it is written again, and the line before
    it is unchanged.
    """
    leave(tmp_path, num_steps=3, finished=True)
    (tmp_path / "eval.json").unlink()
    assert supersede(tmp_path, 3, num_steps=3) == (tmp_path / "superseded" / "step_00000003", 0)
    assert read_metrics(tmp_path / "metrics.jsonl")[-1] == {"step": 2, "loss": 0.25}


def test_a_run_that_goes_back_on_purpose_keeps_the_model_it_had(tmp_path: Path) -> None:
    before = leave(tmp_path, num_steps=4, finished=True)
    assert supersede(tmp_path, 1, num_steps=6) == (tmp_path / "superseded" / "step_00000001", 3)
    kept = contents(tmp_path / "superseded" / "step_00000001")
    assert kept["final/config.json"] == before["final/config.json"] and not (tmp_path / "final").exists()
    assert (tmp_path / "metrics.jsonl").read_bytes() + kept["metrics.jsonl"] == before["metrics.jsonl"]


def test_where_nothing_was_recorded_nothing_is_made(tmp_path: Path) -> None:
    assert supersede(tmp_path, 0, num_steps=3) is None and list(tmp_path.iterdir()) == []
    leave(tmp_path, num_steps=2)
    assert supersede(tmp_path, 2, num_steps=3) is None and not (tmp_path / "superseded").exists()


def of_steps(settings: Settings, num: int) -> Settings:
    return replace(settings, run=replace(settings.run, steps=num))


@pytest.mark.usefixtures("world")
def test_a_finished_run_is_made_longer_behind_its_last_step(random_model: Path, tmp_path: Path) -> None:
    """A run stops at step 2 with a checkpoint, resumes, finishes at step 4 without a checkpoint due
    in between, and is extended to 6 steps. No step is repeated, and all metrics equal those of an
    uninterrupted run of 6 steps.
    """
    whole, settings = (settings_of(tmp_path / name, random_model, AlgoSettings(name="rloo")) for name in ("whole", "run"))
    live(whole)
    with locked(of_steps(settings, 4)):
        live(of_steps(settings, 4), stopped_after=2)
    with locked(of_steps(settings, 4)):
        live(of_steps(settings, 4), evaluation={"eval/greedy_success": 0.5})
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step_00000002", "step_00000004"]
    with locked(settings) as finished:
        policy = live(settings)
    assert not finished.is_finished and policy.told == ["load step_00000004", "update 4", "update 5"]
    lines, expected = ([drop_timings(line) for line in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("run", "whole"))
    assert [line["step"] for line in lines] == list(range(6))
    assert lines[3].pop("eval/greedy_success") == 0.5 and lines == expected
    assert json.loads((tmp_path / "run" / "superseded" / "step_00000004" / "eval.json").read_text()) == {"greedy_success": 0.5}
