"""Training and evaluation from Python (megatron_rl/api.py)."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import megatron_rl
from megatron_rl.api import _collect_words, train, write_rows
from megatron_rl.callbacks import Callbacks
from megatron_rl.cli.config_errors import setting_keys
from megatron_rl.config import DataSettings, Settings, TaskSettings
from megatron_rl.launcher.compose import compose_settings
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.run.checkpoints import read_state
from megatron_rl.tasks.vqa import VqaTask
from tests.conftest import ROOT, SUPPORT
from tests.support import fork_server
from tests.support.comparable_metrics import drop_timings


def words_of(*, model: str = "", data: object = (), run_dir: str = "", reward: object = "", **overrides: object) -> list[str]:
    return _collect_words(model, {"train": data, "eval": ()}, run_dir, reward, overrides)[0]


def test_arguments_are_the_settings_of_the_command_line() -> None:
    """Keyword arguments give the settings of the same words on the command line. No two settings
    are written alike with underscores.
    """
    keys = list(setting_keys(Settings))
    assert len({key.replace(".", "_") for key in keys}) == len(keys)
    given = words_of(
        model="a b", data=["x.jsonl", "it's"], run_dir="out", reward="accuracy", algo="ppo", lora_rank=4, task_stop_on_tool_error=True,
        **{"optim.lr": 1e-4},
    )  # fmt: skip
    by_hand = [
        "task=vqa", "algo=ppo", "model.path='a b'", "run.dir=out", """task.data.train=[x.jsonl,"it's"]""", "task.reward=accuracy",
        "lora.rank=4", "task.stop_on_tool_error=true", "optim.lr=1e-4",
    ]  # fmt: skip
    held_out = "task.data.eval=[e.jsonl]"
    assert compose_settings([*given, held_out]) == compose_settings([*by_hand, held_out])
    assert words_of(task="number_line") == ["task=number_line", "run.dir='runs/number_line'"]
    assert words_of(experiment="vqa_3b_1gpu", data="x.jsonl") == ["experiment=vqa_3b_1gpu", "task.data.train=['x.jsonl']"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"optim_lrr": 1}, r"^optim_lrr: no such argument or setting; did you mean optim_lr \(optim.lr\)\?$"),
        ({"qqqqqqq": 1}, r"^qqqqqqq: no such argument or setting; python -m megatron_rl train --help all lists the settings$"),
        ({"data": [{"question": "q"}], "experiment": "vqa_3b_1gpu"}, r"^run_dir: is required when the data are rows"),
        ({"reward": [lambda reply: 0, lambda reply: 1]}, r"^reward=<function .*: must be a function written in Python, with a name"),
        ({"reward": partial(len)}, r"^reward=functools.partial\(.*: must be a function written in Python"),
        ({"data": [{"question": "q"}, "a.jsonl"], "run_dir": "out"}, r"^train data: must be file names or rows \(mappings\)"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, object], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=told):
        train(**arguments)


def test_rows_are_written_so_that_the_loader_reads_them(tmp_path: Path) -> None:
    """Images keep their pixels, other columns their values, and equal rows give equal files."""
    pictures = [Image.fromarray(np.random.default_rng(seed).integers(0, 256, (30, 40, 3), dtype=np.uint8)) for seed in range(3)]
    rows = [
        {"question": f"q{i}", "answer": str(i), "images": [each], "level": np.int64(i), "none": None} for i, each in enumerate(pictures)
    ]
    first, again = write_rows(rows, tmp_path / "one" / "train"), write_rows(rows, tmp_path / "two" / "train")
    assert first.read_bytes() == again.read_bytes() and first == tmp_path / "one" / "train.jsonl"
    task = VqaTask(TaskSettings(name="vqa", data=DataSettings(train=[str(first)], eval=[str(first)])))
    for number, example in enumerate(task.examples("train")):
        assert (example.payload["question"], example.payload["answer"]) == (f"<image>\nq{number}", str(number))
        assert example.payload["extra"] == {"level": number}
        (image,) = example.payload["images"]
        assert np.array_equal(np.asarray(image.open()), np.asarray(pictures[number]))
    with pytest.raises(ValueError, match=r"^train data: row 0: a value of type object cannot be written; use text, numbers"):
        write_rows([{"question": object()}], tmp_path / "bad" / "train")


def test_callbacks_see_what_is_due() -> None:
    """Without a function that applies, nothing is called and no rank waits."""
    assert Callbacks().call(1, {"loss": 1.0, "eval/greedy_success": 1.0}) is False
    assert Callbacks(after_evaluation=lambda *_: True).call(1, {"loss": 1.0}) is False
    assert Callbacks(after_step=lambda *_: True).call(1, {"eval/greedy_success": 1.0}, has_step=False) is False


def test_importing_the_package_is_cheap() -> None:
    """`import megatron_rl` loads neither torch nor this project's modules."""
    code = "import sys, megatron_rl; print([name for name in sys.modules if name.split('.')[0] in ('torch', 'megatron')], len(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert loaded.startswith("[] ") and megatron_rl.train is train
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        megatron_rl.trian  # noqa: B018


def test_importing_train_prints_nothing() -> None:
    """In a fresh interpreter, no library prints a warning."""
    code = "from megatron_rl import evaluate, train"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")


@pytest.mark.timeout(300)
def test_a_run_from_python(learning_model: Path, tmp_path: Path) -> None:
    """A run on rows in memory, with a reward in the form of TRL, is ended by a callback after step
    2 and leaves a finished run. Oracle: the metrics in its files, and a run of two steps from the
    command line on the same files.
    """
    ended = fork_server.run_script(SUPPORT / "api_run.py", learning_model, tmp_path, timeout_s=240)
    assert ended.returncode == 0, ended.stdout[-6000:]
    seen, run = json.loads((tmp_path / "seen.json").read_text()), tmp_path / "run"
    lines = read_metrics(run / "metrics.jsonl")
    assert seen["steps"] == [[line["step"] + 1, line["reward/mean"]] for line in lines[:2]] and [line["step"] for line in lines] == [
        0,
        1,
        2,
    ]
    assert seen["evaluations"] == [[min(line["step"] + 1, 2), line["eval/greedy_return"]] for line in lines]
    assert seen["result"] == [str(run), 2, 5, True] and seen["text"].startswith("ended by a callback at step 2 of 5: greedy ")
    assert seen["metrics"] == json.loads((run / "eval.json").read_text()) and seen["warnings"] == []
    assert seen["scores"]["return"] == pytest.approx(seen["metrics"]["greedy_return"], abs=1e-12)
    assert read_state(run / "checkpoints" / "step_00000002").step == 2 and (run / "adapter").is_dir()

    words = [
        f"model.path={learning_model}", "task=vqa", f"task.data.train=[{tmp_path}/run_data/train.jsonl]",
        f"task.data.eval=[{tmp_path}/run_data/eval.jsonl]", "task.reward=shares_letters", "lora.rank=2", "optim.lr=1e-3", "run.steps=2",
        "batch.prompts_per_step=4", "batch.group_size=4", "run.eval_every=1", "model.min_pixels=12000", "model.max_pixels=13000",
        "engine.kv_cache_mib=32", "engine.max_model_len=512", "task.max_new_tokens=12", f"run.dir={tmp_path}/by_hand",
    ]  # fmt: skip
    program = tmp_path / "mine.py"
    program.write_text(
        "from megatron_rl.cli import cli\nfrom tests.support.api_run import shares_letters\n\n"
        'if __name__ == "__main__":\n    cli(rewards={"shares_letters": shares_letters})\n'
    )
    by_hand = fork_server.run_script(program, *words, timeout_s=240)
    assert by_hand.returncode == 0, by_hand.stdout[-6000:]
    left, expected = ([compared(line) for line in read_metrics(tmp_path / name / "metrics.jsonl")[:2]] for name in ("run", "by_hand"))
    assert left == expected


def compared(line: dict[str, float]) -> dict[str, float]:
    """Return a step's metrics without timings, rounding differences, and the evaluation, which the
    last step of a run leaves to the end.
    """
    return {key: value for key, value in drop_timings(line).items() if not key.startswith(("rollout_mismatch/", "eval/"))}
