"""Tests which checkpoints are kept, which checkpoint a run resumes from, and which are refused. The
world has one process, and the policy is a stand-in that writes one file.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_rl.config import CheckpointSettings, ModelSettings, RunSettings, Settings, TaskSettings
from megatron_rl.distributed.world import connect, read_world
from megatron_rl.errors import RunFailed
from megatron_rl.run.checkpoint_state import InputDigests
from megatron_rl.run.checkpoints import Checkpoints, CheckpointState, expired, find_checkpoint, list_checkpoints, read_state, write_state
from megatron_rl.run.history import History


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    connect(read_world(), timeout_s=30)
    yield
    dist.destroy_process_group()


@pytest.fixture
def settings(random_model: Path, tmp_path: Path) -> Settings:
    return Settings(
        model=ModelSettings(path=str(random_model)), task=TaskSettings(name="number_line"), run=RunSettings(dir=str(tmp_path)),
        checkpoint=CheckpointSettings(every=1, keep_last=1, keep_best=1),
    )  # fmt: skip


@dataclass
class SlowSave:
    folder: Path
    written: bool = False
    digests: dict[Path, str] = field(default_factory=dict)

    def is_written(self) -> bool:
        return self.written

    def finish(self, *, group: dist.ProcessGroup | None) -> None:
        (self.folder / "tensors").write_text("3.14")
        self.digests = {self.folder / "tensors": hashlib.sha256(b"3.14").hexdigest()}


class SlowPolicy:
    """Stand-in for the policy.

    A save is finished when it is waited for, or when the test marks it as written.
    """

    def __init__(self) -> None:
        self.saves: list[SlowSave] = []

    def save(self, folder: Path, *, background: bool) -> SlowSave:
        self.saves.append(SlowSave(folder))
        return self.saves[-1]


def names(settings: Settings) -> list[str]:
    return sorted(path.name for path in (Path(settings.run.dir) / "checkpoints").iterdir())


def write(settings: Settings, successes: list[float | None]) -> None:
    """Write a checkpoint after every step; a success of None means that the step was not
    evaluated.
    """
    checkpoints = Checkpoints(settings, SlowPolicy(), resume_from=None, inputs=InputDigests(model={"config.json": "ab12"}))
    for step, success in enumerate(successes, start=1):
        checkpoints.begin_step(step)
        metrics = {} if success is None else {"eval/greedy_success": success}
        checkpoints.finish_step(step, history=History(returns=[0.5] * step), metrics=metrics)
    checkpoints.wait_for_save()


@pytest.mark.parametrize(
    ("successes", "keep_last", "keep_best", "gone"),
    [
        ({}, 1, 1, set()),
        ({3: None}, 1, 0, set()),
        ({1: 0.5, 2: 0.9, 3: None, 4: 0.1}, 1, 1, {1, 3}),
        ({1: 0.5, 2: 0.9, 3: None, 4: 0.1}, 2, 0, {1, 2}),
        ({1: 0.5, 2: 0.9, 3: None, 4: 0.1}, 1, 2, {3}),
        ({1: 0.9, 2: 0.9, 3: 0.1}, 1, 1, {1}),
        ({1: None, 2: None, 3: None}, 2, 2, {1}),
        ({9: 0.1, 10: 0.0}, 1, 0, {9}),
    ],
)
def test_the_last_and_the_best_are_kept(successes: dict, keep_last: int, keep_best: int, gone: set[int]) -> None:
    assert expired(successes, keep_last=keep_last, keep_best=keep_best) == gone


def test_what_was_kept_is_found_with_what_the_run_remembers(settings: Settings) -> None:
    assert find_checkpoint(settings) == (None, CheckpointState())
    write(settings, [0.2, 0.7, None, 0.1, None])
    assert names(settings) == ["step_00000002", "step_00000005"]
    checkpoint, state = find_checkpoint(settings)
    assert (checkpoint.name, state.step, state.history.returns, state.success) == ("step_00000005", 5, [0.5] * 5, None)
    assert read_state(list_checkpoints(checkpoint.parent)[0]).success == 0.7
    assert state.settings["model"]["path"] == settings.model.path and state.inputs.model == {"config.json": "ab12"}
    assert {"tensors", "hf/config.json", "hf/tokenizer.json"} <= state.files.keys() and state.files["tensors"]["bytes"] == 4
    sums = subprocess.run(["sha256sum", *state.files], cwd=checkpoint, capture_output=True, text=True, check=True).stdout
    assert sums == "".join(f"{file['sha256']}  {name}\n" for name, file in state.files.items())
    assert not [name for name in state.files if name.endswith(".safetensors")]


@pytest.mark.known_failure("interrupted-save")
def test_a_checkpoint_appears_when_it_is_written(settings: Settings) -> None:
    """A checkpoint is published once it is completely written, and at the latest when the next
    checkpoint begins. The checkpoint that it replaces is deleted last.
    """
    policy = SlowPolicy()
    checkpoints = Checkpoints(settings, policy, resume_from=None, inputs=InputDigests())
    for step in (1, 2):
        checkpoints.begin_step(step)
        checkpoints.finish_step(step, history=History(), metrics={})
    assert names(settings) == [".step_00000002.partial", "step_00000001"]
    policy.saves[1].written = True
    checkpoints.finish_step(3, history=History(returns=[0.0]), metrics={})
    assert names(settings) == ["step_00000002"]
    (checkpoint,) = list_checkpoints(Path(settings.run.dir) / "checkpoints")
    assert read_state(checkpoint).history.returns == [], "of its own step, not of the one that published it"


def test_in_the_foreground_it_is_there_at_the_end_of_its_step(settings: Settings) -> None:
    settings.checkpoint = CheckpointSettings(every=2, background=False)
    checkpoints = Checkpoints(settings, SlowPolicy(), resume_from=None, inputs=InputDigests())
    for step in (1, 2, 3):
        checkpoints.begin_step(step)
        checkpoints.finish_step(step, history=History(), metrics={})
    assert names(settings) == ["step_00000002"]


def test_what_a_kill_left_is_removed(settings: Settings) -> None:
    write(settings, [None])
    leftover = Path(settings.run.dir) / "checkpoints" / ".step_00000002.partial" / "hf"
    leftover.mkdir(parents=True)
    assert find_checkpoint(settings)[1].step == 1
    assert names(settings) == ["step_00000001"]


def test_a_clock_writes_checkpoints_too(settings: Settings) -> None:
    """With every_s=30, a checkpoint is written at the end of the first step that ends at least 30 s
    after the last checkpoint or the start. The steps end at 10, 29, 31, 55, 60, 61 and 200 s.
    """
    settings.checkpoint = CheckpointSettings(every=5, every_s=30.0, keep_last=9)
    now = 0.0
    checkpoints = Checkpoints(settings, SlowPolicy(), resume_from=None, inputs=InputDigests(), clock=lambda: now)
    for step, now in enumerate((10, 29, 31, 55, 60, 61, 200), start=1):  # noqa: B007 (the clock reads it)
        checkpoints.begin_step(step)
        checkpoints.finish_step(step, history=History(), metrics={})
    checkpoints.wait_for_save()
    assert names(settings) == ["step_00000003", "step_00000005", "step_00000007"]
    settings.checkpoint = CheckpointSettings(every_s=0.0)
    checkpoints.begin_step(8)
    checkpoints.wait_for_save()
    assert len(names(settings)) == 3


def test_the_last_step_leaves_a_checkpoint(settings: Settings) -> None:
    """The last step writes a checkpoint by default, whether one is due or not. With
    save_last=false, it writes one only if one is due.
    """
    for save_last, every, expected in ((True, 0, ["step_00000003"]), (False, 0, []), (False, 3, ["step_00000003"])):
        settings.checkpoint = CheckpointSettings(every=every, every_s=0.0, save_last=save_last)
        shutil.rmtree(Path(settings.run.dir) / "checkpoints", ignore_errors=True)
        (Path(settings.run.dir) / "checkpoints").mkdir()
        checkpoints = Checkpoints(settings, SlowPolicy(), resume_from=None, inputs=InputDigests())
        for step in (1, 2, 3):
            checkpoints.begin_step(step, is_last=step == 3)
            checkpoints.finish_step(step, history=History(), metrics={})
        checkpoints.wait_for_save()
        assert names(settings) == expected
    assert CheckpointSettings().save_last


def test_a_checkpoint_can_be_had_at_once(settings: Settings) -> None:
    """`save` writes a checkpoint at once, whether or not it has already begun, and only once per
    step. It writes none for step 0.
    """
    settings.checkpoint = CheckpointSettings(every=2, keep_last=9)
    policy = SlowPolicy()
    checkpoints = Checkpoints(settings, policy, resume_from=None, inputs=InputDigests())
    checkpoints.save(0, history=History(), metrics={})
    assert policy.saves == []
    for step in (2, 3):  # step 2 has begun its checkpoint because one was due; step 3 has not
        checkpoints.begin_step(step)
        checkpoints.save(step, history=History(returns=[0.25], pending_metrics={"loss": 1.5}), metrics={})
        assert read_state(list_checkpoints(Path(settings.run.dir) / "checkpoints")[-1]).history.pending_metrics == {"loss": 1.5}
    checkpoints.save(3, history=History(), metrics={})
    assert names(settings) == ["step_00000002", "step_00000003"] and len(policy.saves) == 2


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "shorter": ("tensors has 1 bytes, not 4", lambda folder: (folder / "tensors").write_text("3")),
    "other numbers": (
        "tensors has the SHA-256 be7a82b16d01e48c6c40abd3962b891c140f73e612b0b9c48dc4e8db68e1e5c5, not "
        "2efff1261c25d94dd6698ea1047f5c0a7107ca98b0a6c2427ee6614143500215",
        lambda folder: (folder / "tensors").write_text("3.41"),
    ),
    "missing": ("tensors is missing", lambda folder: (folder / "tensors").unlink()),
    "a FIFO": ("tensors is missing", lambda folder: (folder / "tensors").unlink() or os.mkfifo(folder / "tensors")),
    "no state": ("run/state.json is missing", lambda folder: (folder / "run" / "state.json").unlink()),
    "half a state": (r"run/state.json cannot be read \(is not valid JSON: [^\n]*\)", lambda folder: _edit(folder, lambda text: text[:20])),
    "another state": (
        r"run/state.json cannot be read \(has the SHA-256 \w{64}, not \w{64}\)",
        lambda folder: _edit(folder, lambda text: text.replace("0.5", "0.7")),
    ),
}


def _edit(folder: Path, change: Callable[[str], str]) -> None:
    state = folder / "run" / "state.json"
    state.write_text(change(state.read_text()))


@pytest.mark.known_failure("interrupted-save")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_goes_back_behind_a_damaged_checkpoint(damage: str, settings: Settings, capfd: pytest.CaptureFixture[str]) -> None:
    """A damaged checkpoint is moved aside with one line of output, and the run resumes from the
    previous intact one. If no other checkpoint is intact, nothing is moved and the run ends.
    """
    words, spoil = DAMAGES[damage]
    write(settings, [0.9, None])
    first, second = list_checkpoints(Path(settings.run.dir) / "checkpoints")
    spoil(second)
    damaged = rf"{re.escape(str(second))}: damaged: {words}"
    kept = Path(settings.run.dir) / "superseded" / "checkpoints" / "step_00000002"
    for target in (kept, kept.with_name("step_00000002.1")):
        checkpoint, state = find_checkpoint(settings)
        assert (checkpoint, state.step, names(settings)) == (first, 1, ["step_00000001"])
        moved = f"moved the checkpoint to {target}; resuming from step_00000001 and repeating the later steps"
        assert re.fullmatch(f"{damaged}; {moved}\n", capfd.readouterr().out)
        assert target.is_dir()
        shutil.copytree(target, second, symlinks=True, copy_function=_copy_anything)
    spoil(first)
    remedy = "no older checkpoint is intact; restore this one from a copy, or move it to another folder to start from the beginning"
    with pytest.raises(ValueError, match=rf"^{damaged}; {remedy}$"):
        find_checkpoint(settings)
    assert names(settings) == ["step_00000001", "step_00000002"]


def _copy_anything(source: str, target: str) -> None:
    subprocess.run(["cp", "-a", source, target], check=True)


def test_a_checkpoint_is_published_beside_a_damaged_older_one(settings: Settings) -> None:
    settings.checkpoint = CheckpointSettings(every=1, keep_last=2, keep_best=0)
    write(settings, [0.9])
    (Path(settings.run.dir) / "checkpoints" / "step_00000001" / "run" / "state.json").write_text("{")
    checkpoints = Checkpoints(settings, SlowPolicy(), resume_from=None, inputs=InputDigests())
    checkpoints.begin_step(2)
    checkpoints.finish_step(2, history=History(), metrics={})
    checkpoints.wait_for_save()
    assert names(settings) == ["step_00000001", "step_00000002"]


def test_a_run_that_stops_by_its_own_judgement_keeps_what_is_on_its_way(settings: Settings) -> None:
    """If a run fails, a pending checkpoint is published if its step was recorded, or if only the
    evaluation of its step failed. The checkpoint of a failed step is not published.
    """
    for name, num_recorded, num_done, expected in (
        ("recorded", 1, 1, "step_00000001"), ("evaluation", 0, 1, "step_00000001"), ("step", 0, 0, ".step_00000001.partial"),
    ):  # fmt: skip
        changed = replace(settings, run=replace(settings.run, dir=f"{settings.run.dir}/{name}"))
        checkpoints = Checkpoints(changed, SlowPolicy(), resume_from=None, inputs=InputDigests())
        checkpoints.begin_step(1)
        for _ in range(num_recorded):
            checkpoints.finish_step(1, history=History(), metrics={"eval/greedy_success": 0.75})
        run = SimpleNamespace(num_done=num_done, history=History(pending_metrics={"loss": 1.0}), metrics={"loss": 1.0})
        with pytest.raises(RunFailed, match="judges are down"), checkpoints.wait_for_save_on_failure(run):
            raise RunFailed("judges are down")
        assert names(changed) == [expected]
        if name != "step":
            state = json.loads((Path(changed.run.dir) / "checkpoints" / expected / "run" / "state.json").read_text())
            assert (state["success"], state["history"]["pending_metrics"]) == ((0.75, {}) if name == "recorded" else (None, {"loss": 1.0}))


def test_an_evaluation_that_was_owed_is_paid_once(settings: Settings) -> None:
    write(settings, [None])
    (newest,) = (Path(settings.run.dir) / "checkpoints").iterdir()
    Checkpoints(settings, SlowPolicy(), resume_from=newest, inputs=InputDigests()).mark_evaluated(
        history=History(num_generation_batches=7), metrics={"eval/greedy_success": 0.5}
    )
    _, state = find_checkpoint(settings)
    assert (state.step, state.success, state.history) == (1, 0.5, History(num_generation_batches=7))


@pytest.mark.parametrize(
    ("key", "value"),
    [("step", 1e999), ("step", -1), ("step", "3"), ("step", 1.5), ("step", None), ("step", True), ("success", "x"), ("settings", []),
     ("history", {"num_generation_batches": "many"})],
)  # fmt: skip
def test_a_state_has_the_types_that_a_run_writes(key: str, value: object, tmp_path: Path) -> None:
    """A state with a correct digest but a wrong type is refused when it is read. The run would meet
    the value hours later, or never.
    """
    (tmp_path / "run").mkdir()
    write_state(
        tmp_path / "run" / "state.json", asdict(CheckpointState(step=3, success=float("nan"), history=History(prompts={"a": [1, 0.5, 2]})))
    )
    intact = read_state(tmp_path)
    assert (intact.step, intact.history) == (3, History(prompts={"a": [1, 0.5, 2]}))
    write_state(tmp_path / "run" / "state.json", {**asdict(intact), key: value})
    with pytest.raises(ValueError, match=rf"^{tmp_path}: damaged: run/state.json cannot be read \({key}.*: .*\)$") as refused:
        read_state(tmp_path)
    assert "\n" not in str(refused.value)
