"""launch/lewis.sh in the seed's calling form: which settings it makes of its words and of each variable; with a python that only tells."""

import os
import subprocess
from pathlib import Path

import pytest

from megatron_rl.config import ListenerSettings
from megatron_rl.tasks.options import LewisSpeakerOptions

ROOT = Path(__file__).resolve().parents[2]
TELLS = """#!/bin/sh
if [ "$1" != -c ]; then printf '%s\\n' "$@"; exit 0; fi
case $2 in *Records*) echo 100 ;; *) echo 4 ;; esac
"""
VARIABLES = (
    "LISTENER_URL", "LISTENER_MODEL", "LISTENER_TIMEOUT", "LISTENER_CHUNK_SIZE", "LISTENER_CHUNK_DELAY", "LISTENER_MAX_RETRIES",
    "LISTENER_BACKOFF_FACTOR", "LISTENER_REWARD_MODE", "NO_PROXY", "DEBUG_MODE", "LOG_PATH", "PICTURES", "EXPERIMENT",
)  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "lewis.sh").write_bytes((ROOT / "launch" / "lewis.sh").read_bytes())
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(TELLS)
    python.chmod(0o755)
    return tmp_path


def called(tree: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = ["bash", str(tree / "launch" / "lewis.sh"), *words]
    return subprocess.run(command, env={**plain, **variables}, capture_output=True, text=True, check=False, timeout=120)


def settings_of(tree: Path, *words: str, **variables: str) -> dict[str, str]:
    told = called(tree, *words, **variables)
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    assert lines[:4] == ["launch/spawn.py", "--nproc_per_node", "4", "launch/train.py"]
    return dict(line.split("=", 1) for line in lines[4:])


def test_the_seeds_words(tree: Path) -> None:
    """100 rounds, 32 a step: four epochs are 13 steps, and two at 16 a step too."""
    plain = settings_of(tree, "gpu07")
    assert plain == {
        "experiment": "lewis_speaker_7b_h100x4", "run.seed": "23", "task.data.images": "data/emoji", "run.steps": "13",
        "task.data.train": "[data/lewis/speaker:train]", "task.data.eval": "[data/lewis/speaker:test]",
        "task.listener.urls": "[http://gpu07:9000]",
    }  # fmt: skip
    given = settings_of(tree, "gpu07", "9100", "2", "mine", "7", "batch.prompts_per_step=16", "model.path=7b", PICTURES="p")
    assert given["task.listener.urls"] == "[http://gpu07:9100]" and given["run.steps"] == "13" and given["run.seed"] == "7"
    assert given["task.data.train"] == "[mine/speaker:train]" and given["model.path"] == "7b" and given["task.data.images"] == "p"


def test_without_a_host_the_listener_is_elsewhere_or_its_own(tree: Path) -> None:
    assert settings_of(tree, "", LISTENER_URL="http://a:1,http://b:1")["task.listener.urls"] == "[http://a:1,http://b:1]"
    seeds = settings_of(tree, "", LISTENER_URL="http://a:1/batch_score,http://b:1/score")
    assert seeds["task.listener.urls"] == "[http://a:1,http://b:1]", "as the game's own has it"
    own = settings_of(tree, "", "9100", LISTENER_MODEL="runs/l")
    assert own["services.listener"] == "{kind: listener, model: 'runs/l', port: 9100}"
    assert own["task.listener.urls"] == "[service:listener]"
    none = called(tree)
    assert none.returncode == 1 and none.stderr.startswith("error: LISTENER_HOST=: there is no listener; give its host")


@pytest.mark.parametrize(
    ("variables", "key", "value"),
    [
        ({"LISTENER_TIMEOUT": "45"}, "task.listener.timeout_s", "45"),
        ({"LISTENER_CHUNK_SIZE": "9"}, "task.listener.chunk_size", "9"),
        ({"LISTENER_CHUNK_DELAY": "0.5"}, "task.listener.chunk_delay_s", "0.5"),
        ({"LISTENER_MAX_RETRIES": "7"}, "task.listener.tries", "7"),
        ({"LISTENER_BACKOFF_FACTOR": "2.0"}, "task.listener.backoff_s", "2.0"),
        ({"LISTENER_REWARD_MODE": "binary"}, "task.options.accuracy", "binary"),
        ({"NO_PROXY": "gpu07"}, "task.listener.proxy", "true"),
        ({"DEBUG_MODE": "true", "LOG_PATH": "x.jsonl"}, "task.options.log", "x.jsonl"),
        ({"DEBUG_MODE": "true"}, "task.options.log", "runs/lewis/predictions.jsonl"),
    ],
)
def test_each_variable_is_one_setting(tree: Path, variables: dict[str, str], key: str, value: str) -> None:
    """That there is, and that its dataclass has; nothing else changes."""
    plain, given = settings_of(tree, "gpu07"), settings_of(tree, "gpu07", **variables)
    assert given == {**plain, key: value}
    room, name = key.split(".")[1:]
    assert name in {"listener": ListenerSettings, "options": LewisSpeakerOptions}[room].__dataclass_fields__


def test_a_path_alone_logs_nothing(tree: Path) -> None:
    assert settings_of(tree, "gpu07", LOG_PATH="x") == settings_of(tree, "gpu07", DEBUG_MODE="false") == settings_of(tree, "gpu07")
