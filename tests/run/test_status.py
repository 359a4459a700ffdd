"""Tests the status of a run, as derived from the files in its run directory and from the process
that holds the lock.
"""

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megatron_rl.run.directory import ENDED, LOCK, lock, locked
from megatron_rl.run.process import LATEST, LOGS, ManagedProcess, open_output
from megatron_rl.run.status import RunState, is_locked, read_status
from tests.run.test_directory import leave, settings_of
from tests.support.single_process_policy import single_process_world

STEPS = "".join(json.dumps({"step": step, "reward/mean": 0.5, "time/total": 1800.0}) + "\n" for step in range(3))


def say(folder: Path, *lines: str, age_s: float = 0.0) -> None:
    """Write the output of a new attempt, with the given age."""
    output = open_output(folder / LOGS)
    output.write_text("".join(f"{line}\n" for line in lines))
    now = time.time() - age_s
    os.utime(output, (now, now))


def end(folder: Path, state: str, line: str = "") -> None:
    (folder / ENDED).write_text(json.dumps({"state": state, "line": line}))


def in_another_process(act: Callable[[Path], None], folder: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=act, args=[folder])
    process.start()
    process.join()
    assert process.exitcode == 0


def test_what_lies_there_says_how_it_stands(tmp_path: Path) -> None:
    def seen(name: str) -> tuple[RunState, str]:
        found = read_status(tmp_path / name)
        return found.state, found.error

    assert seen("nowhere") == (RunState.WAITING, "")
    leave(tmp_path / "submitted", "config")
    assert seen("submitted") == (RunState.WAITING, "")
    leave(tmp_path / "killed", "steps")
    assert seen("killed") == (RunState.FAILED, "ended without an error message; it may have been killed")
    leave(tmp_path / "killed early", "checkpoint")
    assert seen("killed early")[0] is RunState.FAILED
    for state, line in (("stopped", ""), ("failed", "optim.lr=9: too much")):
        leave(tmp_path / state, "steps checkpoint")
        end(tmp_path / state, state, line)
        assert seen(state) == (RunState(state), line)
    leave(tmp_path / "finished", "steps finished")
    end(tmp_path / "finished", "failed", "an older life")
    assert seen("finished") == (RunState.FINISHED, "")


def test_the_newest_word_counts(tmp_path: Path) -> None:
    """The newest of the attempt's output and ended.json determines the status. If the model cannot
    be read, no run begins and only the attempt's output exists. A run that was started by hand has
    no attempt output.
    """
    say(tmp_path, "resume: x", "error: model.path=x: no such folder", "2 nodes")
    assert (read_status(tmp_path).state, read_status(tmp_path).error) == (RunState.FAILED, "model.path=x: no such folder")
    say(tmp_path, "error: old", "stopped at step 2 of 5; the same command resumes the run", age_s=100)
    assert read_status(tmp_path).state is RunState.STOPPED
    end(tmp_path, "failed", "newer")
    assert read_status(tmp_path).error == "newer"
    say(tmp_path)
    assert read_status(tmp_path).error == "newer", "an attempt that said nothing of its end"
    os.utime(tmp_path / ENDED, (1, 1))
    say(tmp_path, "error: newest", age_s=100)
    assert read_status(tmp_path).error == "newest"
    assert len(list((tmp_path / LOGS).glob("attempt_*"))) == 4 and (tmp_path / LOGS / "latest").resolve().name == "attempt_4"


def test_numbers_are_those_of_the_steps(tmp_path: Path) -> None:
    leave(tmp_path, "config")
    (tmp_path / "metrics.jsonl").write_text(
        STEPS + '{"step": 40, "eval/greedy_success": "NaN", "eval/greedy_episodes": 30, "time/total": 1}\n'
    )
    seen = read_status(tmp_path)
    assert (seen.step, seen.num_steps, seen.train_hours) == (40, 40, pytest.approx((3 * 1800 + 1) / 3600))
    assert seen.evaluation["greedy_episodes"] == 30 and seen.settings["optim.lr_by_module.vision"] == 0.5
    (tmp_path / "metrics.jsonl").write_text(STEPS + '{"step": 3, "rew')
    assert (read_status(tmp_path).step, read_status(tmp_path).evaluation) == (3, {})
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**config, "stage": "sft"}))
    assert read_status(tmp_path).num_steps == 30 + 10
    (tmp_path / "config.yaml").write_text("{half")
    with pytest.raises(ValueError, match="config.yaml: line 1 is not valid YAML"):
        read_status(tmp_path)


def test_who_holds_it_runs(tmp_path: Path) -> None:
    """A run is running while a process holds its lock or the output of an attempt. Reading the
    status takes no lock.
    """
    leave(tmp_path, "steps finished")
    kept = lock(tmp_path)
    in_another_process(lambda folder: _require(read_status(folder).state is RunState.RUNNING), tmp_path)
    kept.close()
    in_another_process(lambda folder: _require(not is_locked(folder / LOCK) and read_status(folder).state is RunState.FINISHED), tmp_path)
    attempt = ManagedProcess(["sleep", "60"], output=open_output(tmp_path / LOGS))
    in_another_process(lambda folder: _require(is_locked(folder / LATEST) and read_status(folder).state is RunState.RUNNING), tmp_path)
    attempt.forward_signal(10)
    assert attempt.wait() == os.EX_TEMPFAIL
    in_another_process(lambda folder: _require(read_status(folder).state is RunState.FINISHED), tmp_path)


def _require(condition: bool) -> None:
    assert condition


def test_a_life_leaves_its_word(tmp_path: Path) -> None:
    """An attempt of a started run writes ended.json. A refused run, a run that failed before it
    created files, and a finished run leave none.
    """

    def live(folder: Path, *, error: BaseException | None = None, finishes: bool = False, **changes: object) -> str:
        with locked(settings_of(folder, **changes)):
            if (folder / ENDED).exists():
                return "the word of the life before"
            if finishes:
                leave(folder, "steps finished")
            if error is not None:
                raise error
        return ""

    def word(folder: Path) -> dict | None:
        """Return the content of ended.json.

        Its step is that of the newest checkpoint and determines which steps the next attempt may
        repeat.
        """
        return json.loads((folder / ENDED).read_text()) if (folder / ENDED).exists() else None

    folder = tmp_path / "run"
    with single_process_world():
        with pytest.raises(ValueError, match="no model"):
            live(folder, error=ValueError("no model"))
        assert not folder.exists()
        leave(folder, "steps checkpoint")
        with pytest.raises(RuntimeError):
            live(folder, error=RuntimeError("gloo:\n closed"))
        assert word(folder) == {"state": "failed", "line": "gloo: closed", "step": 20}
        with pytest.raises(ValueError, match="other settings"):
            live(folder, optim={"lr": 0.25})
        assert word(folder) == {"state": "failed", "line": "gloo: closed", "step": 20}
        assert live(folder) == "" and word(folder) == {"state": "stopped", "line": "", "step": 20}
        with pytest.raises(KeyboardInterrupt):
            live(folder, error=KeyboardInterrupt())
        assert word(folder) == {"state": "stopped", "line": "", "step": 20}
        with pytest.raises(KeyError):
            live(folder, error=KeyError())
        assert word(folder) == {"state": "failed", "line": "KeyError", "step": 20}
        assert live(folder, finishes=True) == "" and word(folder) is None
