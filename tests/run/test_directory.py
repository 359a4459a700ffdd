"""Tests what a start does with an existing run directory, as a table of its contents and the
changed settings. Also tests the lock, which a process holds, and the moving of old runs.
"""

import errno
import json
import multiprocessing
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from megatron_rl.config import ListenerSettings, ModelSettings, OptimSettings, RunSettings, Settings, SftSettings, TaskSettings
from megatron_rl.config.task_options import AlfworldOptions, LewisSpeakerOptions
from megatron_rl.run.changed_settings import MUTABLE_KEYS, describe_changes, is_mutable_key
from megatron_rl.run.checkpoint_state import CheckpointState, write_state
from megatron_rl.run.directory import ENDED, LOCK, lock, locked, read_resume_state
from megatron_rl.run.status import RunState, read_status
from tests.support.single_process_policy import single_process_world


def hold(folder: Path) -> None:
    """Hold the lock of the run directory until the process is killed."""
    kept = lock(folder)
    (folder / "is mine").touch()
    time.sleep(60)
    kept.close()


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with single_process_world():
        yield


def settings_of(folder: Path, *, stage: str = "rl", **changes: object) -> Settings:
    """Return settings with changed groups, given as in `optim={"lr": 0.25}`."""
    settings = Settings(
        stage=stage, model=ModelSettings(path="model"), task=TaskSettings(name="alfworld", options=AlfworldOptions()),
        optim=OptimSettings(lr_by_module={"vision": 0.5}), run=RunSettings(dir=str(folder), steps=40),
        sft=SftSettings(splits=["a", "b"], steps=[30, 10]),
    )  # fmt: skip
    for room, values in changes.items():
        settings = replace(settings, **{room: replace(getattr(settings, room), **values)})
    return settings


def leave(folder: Path, state: str, *, stage: str = "rl") -> None:
    """Create the files that a run with the settings above leaves.

    `state` contains these words: 'config' (always implied), 'steps', 'checkpoint' (of step 20),
    'last' (the checkpoint of step 40), 'finished', 'stopped' (at step 40).
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(asdict(settings_of(folder, stage=stage)), sort_keys=False))
    (folder / "metrics.jsonl").write_text('{"step": 0}\n' if "steps" in state else "")
    if "checkpoint" in state:
        (folder / "checkpoints" / "step_00000020").mkdir(parents=True)
    if "last" in state:
        (folder / "checkpoints" / "step_00000040").mkdir(parents=True)
    if "stopped" in state:
        (folder / ENDED).write_text(json.dumps({"state": "stopped", "line": "", "step": 40}))
    if "finished" in state:
        (folder / "final").mkdir()
        (folder / "final" / "config.json").write_text("{}")
        (folder / "final" / "model.safetensors").write_text("")
        (folder / "eval.json").write_text(json.dumps({"greedy_success": 0.5, "sampled_success": 0.25}))


LR, LONGER, SHORTER, FREELY = {"optim": {"lr": 0.25}}, {"run": {"steps": 60}}, {"run": {"steps": 30}}, {"parallel": {"tp": 2}}
MANY = {**FREELY, "engine": {"kv_cache_mib": 7}, "checkpoint": {"every": 3}, "wandb": {"mode": "offline"}, "plan": {"gpu": "l4"}}
HEARD = LewisSpeakerOptions(
    log="here/log.jsonl", sheets="here/sheets", held_out_listeners={"frozen": "http://a:9"}, held_out_token_files={"frozen": "t"}
)  # fmt: skip
REPEAT = {"checkpoint": {"allow_repeat": True}}
BEGINS, RESUMES, FINISHED, REFUSED = "begins", "resumes", "finished", "refused"
TABLE = [  # contents of the run directory, changed settings, outcome
    ("config", {}, BEGINS), ("config", LR, BEGINS), ("config", LONGER, BEGINS),
    ("steps", {}, BEGINS), ("steps", MANY, BEGINS), ("steps", LONGER, BEGINS), ("steps", SHORTER, REFUSED), ("steps", LR, REFUSED),
    ("steps checkpoint", {}, RESUMES), ("steps checkpoint", MANY, RESUMES), ("steps checkpoint", LONGER, RESUMES),
    ("steps checkpoint", SHORTER, REFUSED), ("steps checkpoint", LR, REFUSED), ("checkpoint", LR, REFUSED),
    ("steps checkpoint", {"optim": {"lr_by_module": {"merger": 0.5}}}, REFUSED), ("steps checkpoint", {"lora": {"alpha": 5.0}}, REFUSED),
    ("steps checkpoint", {"task": {"options": AlfworldOptions(processes=2, call_s=90.0)}}, RESUMES),
    ("steps checkpoint", {"task": {"options": AlfworldOptions(history=6)}}, REFUSED),
    ("steps checkpoint", {"task": {"options": None}}, REFUSED),
    ("steps checkpoint", {"optim": {"lr_by_module": {"vision": 0.25}}}, REFUSED),
    ("steps checkpoint", {"model": {"frozen": ["vision"]}}, REFUSED),
    ("steps checkpoint", {"task": {"name": "other"}}, REFUSED),
    ("steps checkpoint finished", {}, FINISHED), ("steps finished", {}, FINISHED), ("steps finished", MANY, FINISHED),
    ("steps last finished", LONGER, RESUMES), ("steps checkpoint last finished", LONGER, RESUMES),
    ("steps checkpoint finished", LONGER, REFUSED), ("steps checkpoint finished", {**LONGER, **REPEAT}, RESUMES),
    ("steps finished", LONGER, REFUSED), ("steps finished", {**LONGER, **REPEAT}, BEGINS), ("steps finished", SHORTER, REFUSED),
    ("steps last stopped", {}, RESUMES), ("steps checkpoint stopped", {}, REFUSED), ("steps checkpoint stopped", REPEAT, RESUMES),
    ("steps stopped", {}, REFUSED), ("steps stopped", REPEAT, BEGINS),
    ("steps finished", LR, REFUSED), ("steps last finished", {**LONGER, **LR}, REFUSED),
]  # fmt: skip


@pytest.mark.parametrize(("state", "changes", "expected"), TABLE, ids=str)
def test_the_rule(state: str, changes: dict, expected: str, tmp_path: Path) -> None:
    leave(tmp_path, state)
    assert outcome(tmp_path, settings_of(tmp_path, **changes)) == expected


def outcome(folder: Path, settings: Settings) -> str:
    found = read_resume_state(folder, settings)
    return REFUSED if found.refusal else FINISHED if found.is_finished else RESUMES if found.newest_checkpoint else BEGINS


def test_a_task_without_options_of_its_own_goes_on(tmp_path: Path) -> None:
    without = settings_of(tmp_path, task={"options": None})
    leave(tmp_path, "steps checkpoint")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(without), sort_keys=False))
    assert outcome(tmp_path, without) == RESUMES and outcome(tmp_path, settings_of(tmp_path)) == REFUSED


@pytest.mark.parametrize(
    ("steps", "splits", "expected"),
    [
        ([30, 10], ["a", "b"], FINISHED), ([30, 15], ["a", "b"], RESUMES), ([30, 5], ["a", "b"], REFUSED), ([35, 10], ["a", "b"], REFUSED),
        ([30, 15], ["a", "c"], REFUSED),
    ],
)  # fmt: skip
def test_of_a_warm_start_only_the_last_stage_grows(steps: list[int], splits: list[str], expected: str, tmp_path: Path) -> None:
    leave(tmp_path, "steps last finished", stage="sft")
    assert outcome(tmp_path, settings_of(tmp_path, stage="sft", sft={"steps": steps, "splits": splits})) == expected
    assert outcome(tmp_path, settings_of(tmp_path, stage="rl", sft={"steps": steps, "splits": splits})) == REFUSED


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ((2.0, 40), (2.0, 40), FINISHED), ((2.0, 40), (3.0, 60), RESUMES), ((2.0, 40), (1.0, 20), REFUSED),
        ((0.0, 40), (3.0, 60), RESUMES), ((0.0, 40), (1.0, 20), REFUSED), ((3.0, 40), (0.0, 60), RESUMES), ((3.0, 40), (0.0, 30), REFUSED),
        ((2.0, 40), (2.0, 9), FINISHED), ((2.0, 40), (3.0, 9), RESUMES),
    ],
)  # fmt: skip
def test_epochs_decide_where_both_runs_have_them(old: tuple[float, int], new: tuple[float, int], expected: str, tmp_path: Path) -> None:
    """Epochs can be increased. The last two rows are a sweep's view: the number of steps is not
    known before the data is read.
    """
    leave(tmp_path, "steps last finished")
    stored = settings_of(tmp_path, run={"epochs": old[0], "steps": old[1]})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(stored), sort_keys=False))
    assert outcome(tmp_path, settings_of(tmp_path, run={"epochs": new[0], "steps": new[1]})) == expected


@pytest.mark.parametrize(("asked", "expected"), [("auto", RESUMES), ("bfloat16", RESUMES), ("float32", REFUSED)])
def test_an_open_dtype_fits_every_run(asked: str, expected: str, tmp_path: Path) -> None:
    """A login node without a GPU does not know the data types that the run uses."""
    leave(tmp_path, "steps checkpoint")
    stored = settings_of(tmp_path, model={"dtype": "bfloat16"}, engine={"dtype": "bfloat16"})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(stored), sort_keys=False))
    assert outcome(tmp_path, settings_of(tmp_path, model={"dtype": asked}, engine={"dtype": asked})) == expected


def test_what_is_not_a_run_is_no_obstacle_and_what_cannot_be_read_is_one(tmp_path: Path) -> None:
    assert outcome(tmp_path / "new", settings_of(tmp_path / "new")) == BEGINS
    leave(tmp_path, "steps checkpoint")
    ran = tmp_path / "ran"
    for text in (f"!!python/object/apply:pathlib.Path.touch [{ran}]", "- a list", "{half"):
        (tmp_path / "config.yaml").write_text(text)
        assert "whose config.yaml cannot be read" in read_resume_state(tmp_path, settings_of(tmp_path)).refusal
    assert not ran.exists()
    (tmp_path / "config.yaml").unlink()
    assert outcome(tmp_path, settings_of(tmp_path)) == REFUSED


@pytest.mark.parametrize(
    ("key", "expected"), [("optim.lr", REFUSED), ("lora", REFUSED), ("run.steps", REFUSED), ("parallel.tp", RESUMES), ("wandb", REFUSED)]
)
@pytest.mark.parametrize("is_more", [False, True])
def test_a_key_that_only_one_of_the_two_has_is_a_change(key: str, expected: str, is_more: bool, tmp_path: Path) -> None:
    """A key that exists only in config.yaml or only in the settings is a change. Keys that may
    change are exempt, but a whole group of keys is never exempt.
    """
    leave(tmp_path, "steps checkpoint")
    stored = yaml.safe_load((tmp_path / "config.yaml").read_text())
    part, _, name = key.rpartition(".")
    group = stored[part] if part else stored
    if is_more:
        group[f"{name}_of_old"] = 1
    else:
        del group[name]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(stored))
    found = read_resume_state(tmp_path, settings_of(tmp_path))
    assert (REFUSED if found.refusal else RESUMES) == expected
    change = f"{key}_of_old=absent (was 1)" if is_more else f"{key}="
    said = found.refusal or describe_changes(found.changes)
    assert (change in said and (is_more or "(was absent)" in said)) or key == "run.steps"


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    """A renamed checkpoint is refused: one of step 40 with the name of step 20, after the run
    stopped at step 40, and one of step 20 with the name of step 40, which would train 20 steps
    fewer.
    """
    for step, name, state in ((40, 20, "steps checkpoint stopped"), (20, 40, "steps last")):
        folder = tmp_path / str(name)
        leave(folder, state)
        checkpoint = folder / "checkpoints" / f"step_{name:08d}"
        (checkpoint / "run").mkdir()
        write_state(checkpoint / "run" / "state.json", asdict(CheckpointState(step=step)))
        assert read_resume_state(folder, settings_of(folder)).refusal == (
            f"{checkpoint} is the checkpoint of step {step} according to its run/state.json; rename it to step_{step:08d}"
        )
        short = checkpoint.rename(checkpoint.with_name(f"step_{step}"))
        assert read_resume_state(folder, settings_of(folder)).refusal.startswith(f"{short} is the checkpoint of step {step} according ")
        short.rename(checkpoint.with_name(f"step_{step:08d}"))
        assert outcome(folder, settings_of(folder)) == RESUMES


@pytest.mark.parametrize("gone", ["config.json", "model.safetensors", "model-00002-of-00002.safetensors"])
def test_without_all_of_its_weights_a_run_is_not_finished(gone: str, tmp_path: Path) -> None:
    leave(tmp_path, "steps last finished")
    final = tmp_path / "final"
    if gone.startswith("model-"):
        shards = [gone.replace("00002-", "00001-"), gone]
        index = {"weight_map": {str(number): name for number, name in enumerate(shards)}}
        (final / "model.safetensors.index.json").write_text(json.dumps(index))
        for name in shards:
            (final / name).touch()
    assert outcome(tmp_path, settings_of(tmp_path)) == FINISHED and read_status(tmp_path).state is RunState.FINISHED
    (final / gone).unlink()
    found, missing = read_resume_state(tmp_path, settings_of(tmp_path)), gone.replace("model.safe", "*.safe")
    newest = tmp_path / "checkpoints" / "step_00000040"
    assert found.newest_checkpoint == newest and not found.is_finished
    assert found.describe_start(tmp_path, newest) == f"resume: {newest}; {final / missing} is missing, the run is not finished"
    newest.rename(newest.with_name("step_00000020"))
    refusal = read_resume_state(tmp_path, settings_of(tmp_path)).refusal
    assert refusal.startswith(f"{final / missing} is missing, the newest checkpoint is from step 20, but the run has completed 40 steps: ")
    seen = read_status(tmp_path)
    assert (seen.state, seen.error) == (RunState.FAILED, f"{final / missing} is missing; the same command writes it again")


def test_every_free_key_is_a_setting_or_a_group_of_them() -> None:
    """Every key in MUTABLE_KEYS matches a setting or a group of settings, and permits only changes
    of these. A misspelled key, or a key without its dot, would permit none.
    """
    plain = settings_of(Path("run"))
    games = [replace(plain, task=replace(plain.task, options=options)) for options in (AlfworldOptions(), HEARD)]
    keys = {key for settings in games for key in dotted(asdict(settings))}
    for free in MUTABLE_KEYS:
        named = {key for key in keys if (key.startswith(free) if free.endswith(".") else key == free)}
        assert named and free.endswith(".") == (named != {free}), f"{free}: {named}"
        assert all(is_mutable_key(key, old=1, new=2) for key in named), free
    assert not is_mutable_key("optim.lr", old=1, new=2)


def test_a_game_goes_on_where_its_listeners_and_its_folder_are_now(tmp_path: Path) -> None:
    """A game may resume with its listeners at other addresses and its log in a moved run directory.
    A held-out listener may be added, because it never gives rewards. A change of the reward is
    refused.
    """
    task = TaskSettings(name="lewis_speaker", options=HEARD, listener=ListenerSettings(urls=["http://a:9000"]))
    leave(tmp_path, "steps checkpoint")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(replace(settings_of(tmp_path), task=task)), sort_keys=False))

    def now(options: LewisSpeakerOptions) -> str:
        there = replace(task, options=options, listener=ListenerSettings(urls=["http://b:9000"], timeout_s=5.0))
        return outcome(tmp_path, replace(settings_of(tmp_path), task=there))

    moved = replace(HEARD, log="there/log.jsonl", sheets="there/sheets", held_out_listeners={"frozen": "http://b:9"})
    moved = replace(moved, held_out_token_files={"frozen": "u"})
    assert now(moved) == RESUMES
    assert now(replace(moved, held_out_listeners={**moved.held_out_listeners, "stranger": "http://b:8"})) == RESUMES
    assert now(replace(moved, accuracy="binary")) == REFUSED


def dotted(settings: dict, prefix: str = "") -> list[str]:
    """Return the keys of all settings in the form of the command line."""
    parts = [dotted(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [prefix + key] for key, value in settings.items()]
    return [key for keys in parts for key in keys]


def test_what_a_refusal_and_a_resumption_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(tmp_path, "steps checkpoint")
    told = (
        f"run.dir={tmp_path}: contains a run with other settings: optim.lr=0.25 (was 1e-06), run.steps=30 (was 40); "
        "set run.overwrite=true to move this folder aside, or choose another folder"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"), locked(settings_of(tmp_path, **LR, **SHORTER)):
        pass
    for changes, line in (({}, ""), ({**LONGER, **FREELY}, "; changed since: parallel.tp=2 (was 1), run.steps=60 (was 40)")):
        with locked(settings_of(tmp_path, **changes)) as standing:
            found = tmp_path / "checkpoints" / "step_00000007"
            assert standing.describe_start(tmp_path, found) == f"resume: {found}{line}"
        assert capsys.readouterr().out == "", "which checkpoint is intact is not known yet"


def test_an_older_checkpoint_is_refused_with_both_steps_and_every_remedy(tmp_path: Path) -> None:
    for number, (state, changes, has) in enumerate((
        ("steps checkpoint finished", LONGER, "run.steps=60 (was 40): the newest checkpoint is from step 20"),
        ("steps checkpoint stopped", {}, "the newest checkpoint is from step 20"),
        ("steps stopped", {}, "there is no checkpoint"),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        leave(folder, state)
        repeats = 20 if "checkpoint" in state else 40
        told = (
            f"run.dir={folder}: {has}, but the run has completed 40 steps: resuming would repeat {repeats} steps "
            f"(checkpoint.allow_repeat=true allows it, and keeps their records in {folder}/superseded); "
            "set run.overwrite=true to move this folder aside, or choose another folder"
        )
        with pytest.raises(ValueError, match=f"^{re.escape(told)}$"), locked(settings_of(folder, **changes)):
            pass
        assert (folder / ENDED).exists() == ("stopped" in state), "a refusal leaves the folder as it was"


def test_a_run_that_is_stopped_while_it_starts_after_a_crash_goes_on(tmp_path: Path) -> None:
    """A run was killed at step 30 with a checkpoint of step 20, and the next attempt is stopped
    before its first step. No checkpoint is missing, so the run resumes.
    """
    leave(tmp_path, "steps checkpoint")
    with locked(settings_of(tmp_path)):
        pass
    assert json.loads((tmp_path / ENDED).read_text()) == {"state": "stopped", "line": "", "step": 20}
    assert outcome(tmp_path, settings_of(tmp_path)) == RESUMES
    (tmp_path / ENDED).write_text("half a lin")
    assert outcome(tmp_path, settings_of(tmp_path)) == RESUMES, "what cannot be read counts as a crash"


def test_a_finished_run_is_told_by_its_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(tmp_path, "steps finished")
    with locked(settings_of(tmp_path)) as standing:
        assert standing.is_finished and standing.evaluation == {"greedy_success": 0.5, "sampled_success": 0.25}
    assert capsys.readouterr().out == ""


def test_overwriting_moves_aside_and_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """run.overwrite moves a run with other settings and a finished run aside. A run that can be
    resumed is resumed, so that repeating a command does not start a new run.
    """
    folder = tmp_path / "run"
    (tmp_path / "run.1").mkdir()
    for number, (state, changes) in enumerate((("steps checkpoint", LR), ("steps finished", {})), start=2):
        leave(folder, state)
        before = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK}
        with locked(settings_of(folder, run={"overwrite": True}, **changes)) as standing:
            assert (
                not standing.is_finished
                and standing.describe_start(folder, None) == ""
                and [path.name for path in folder.iterdir()] == [LOCK]
            )
        aside = tmp_path / f"run.{number}"
        after = {path.relative_to(aside): path.read_bytes() for path in aside.rglob("*") if path.is_file() and path.name != LOCK}
        assert before == after
        assert capsys.readouterr().out == f"run.overwrite=true: the contents of {folder} are now in {aside}; starting a new run\n"
    leave(folder, "steps checkpoint")
    with locked(settings_of(folder, run={"overwrite": True})):
        assert (folder / "checkpoints").exists()
    assert not (tmp_path / "run.4").exists()


def test_a_folder_that_was_removed_hides_no_error(tmp_path: Path) -> None:
    """If the run directory was removed, the error that ended the run is raised, not an error about
    the missing directory.
    """
    folder = tmp_path / "run"

    def lose() -> None:
        leave(folder, "steps")
        shutil.rmtree(folder)
        raise OSError(f"run.dir={folder}: could not be written")

    with pytest.raises(OSError, match="could not be written"), locked(settings_of(folder)):
        lose()


def test_a_folder_is_held_by_one_process(tmp_path: Path) -> None:
    """The lock is held by a live process. When the process is killed, the lock is free, whatever
    the lock file contains.
    """
    folder = tmp_path / "run"
    holder = multiprocessing.get_context("fork").Process(target=hold, args=[folder])
    holder.start()
    try:
        while not (folder / "is mine").exists():
            assert holder.is_alive()
            time.sleep(0.02)
        told = rf"^run.dir={folder}: in use by an active run \(host \S+, pid {holder.pid}, since [-0-9]+ [:0-9]+\); choose another folder$"
        for overwrite in (False, True):
            with pytest.raises(ValueError, match=told), locked(settings_of(folder, run={"overwrite": overwrite})):
                pass
    finally:
        holder.kill()
        holder.join()
    with locked(settings_of(folder)):
        pass


def test_what_a_life_before_has_half_written_goes(tmp_path: Path) -> None:
    """A start removes hidden partial files of earlier attempts, but no directories. Their own
    writers remove partial checkpoints and models.
    """
    leave(tmp_path, "config, steps, checkpoint")
    halves = [tmp_path / ".ended.json.partial", tmp_path / "rollouts" / ".step_000000.jsonl.partial"]
    others = [tmp_path / "mine.partial", tmp_path / ".final.partial" / "a"]
    for path in halves + others:
        path.parent.mkdir(exist_ok=True)
        path.write_text("{")
    with locked(settings_of(tmp_path)) as standing:
        assert not standing.is_finished and not any(path.exists() for path in halves) and all(path.exists() for path in others)


def test_a_disk_that_becomes_read_only_does_not_hide_what_a_run_ends_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has only the lock file in its directory removes the directory at its end. If this
    fails, the original error is still raised.
    """

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def live() -> None:
        with locked(settings_of(tmp_path / "run")):
            assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]
            monkeypatch.setattr(Path, "unlink", refuse)
            raise ValueError("model.path=a: is none")

    with pytest.raises(ValueError, match="^model.path=a: is none$"):
        live()
