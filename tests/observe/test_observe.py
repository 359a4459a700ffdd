"""Metrics, timers, progress display and plots. Oracles: TensorBoard's reader, the json module, a
clock that the test moves, and values computed by hand.
"""

import hashlib
import io
import json
import math
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_rl.config import WandbSettings
from megatron_rl.io.jsonl import read_lines, to_json_line, write_lines_atomically
from megatron_rl.observe.metrics import MetricsLog, StepTimer, read_metrics
from megatron_rl.observe.plot import main, moving_average, plot_reward_curves
from megatron_rl.observe.progress import ProgressDisplay
from megatron_rl.run.superseded_steps import supersede_records
from tests.observe.test_recorder import picture

DISABLED = WandbSettings(mode="disabled")


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def refuse_constant(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")


def write_run(folder: Path, values: dict[int, float], *, start_step: int = 0) -> None:
    supersede_records(folder, first_step=start_step, first_line=start_step, num_steps=9, results=(), models=())
    log = MetricsLog(folder, DISABLED, {}, start_step=start_step)
    for step, value in values.items():
        log.log(step, {"reward/mean": value, "loss": 2 * value})
    log.close()


def tensorboard_scalars(folder: Path, name: str) -> dict[int, float]:
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return {event.step: event.value for event in accumulator.Scalars(name)}


def test_metrics_go_to_jsonl_and_to_tensorboard(tmp_path: Path):
    values = {0: 0.5, 1: -1.25, 2: 3.0}
    write_run(tmp_path, values)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": step, "reward/mean": value, "loss": 2 * value} for step, value in values.items()]
    assert tensorboard_scalars(tmp_path, "reward/mean") == values  # exact in float32
    assert tensorboard_scalars(tmp_path, "loss") == {step: 2 * value for step, value in values.items()}


def test_each_line_is_on_disk_when_log_returns(tmp_path: Path):
    log = MetricsLog(tmp_path, DISABLED, {})
    for step in range(3):
        log.log(step, {"a": 1.0})
        assert (tmp_path / "metrics.jsonl").read_text().count("\n") == step + 1
    log.close()


def test_each_line_is_flushed_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """fsync is called on metrics.jsonl after each line, when the file has its full size.
    tests/chaos/test_disks.py checks the contents after a power failure.
    """
    flushed, fsync = [], os.fsync

    def counted(descriptor: int) -> None:
        flushed.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", counted)
    log = MetricsLog(tmp_path, DISABLED, {})
    for step in range(2):
        log.log(step, {"a": 1.0})
        file = (tmp_path / "metrics.jsonl").stat()
        assert flushed[-1] == (file.st_ino, file.st_size)
    log.close()


def test_a_run_folder_that_is_gone_is_noticed_at_the_next_step(tmp_path: Path):
    """Logging raises OSError if the run directory was removed, or was replaced by that of another
    run, so that nothing is written to a place that nobody reads.
    """
    for spoil, told in ((move_away, "No such file"), (put_another, "belongs to another run")):
        folder = tmp_path / spoil.__name__
        log = MetricsLog(folder, DISABLED, {})
        log.log(0, {"a": 1.0})
        spoil(folder)
        with pytest.raises(OSError, match=told):
            log.log(1, {"a": 1.0})


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_takes_no_more_of_tensorboards_file_ends_the_step(tmp_path: Path):
    """The error is raised at once in the training loop, not as a traceback in TensorBoard's writer
    thread.
    """
    log = MetricsLog(tmp_path, DISABLED, {})
    log.log(0, {f"a{number}": 1.0 for number in range(99)})
    (events,) = (tmp_path / "tensorboard").iterdir()
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert events.stat().st_size > (tmp_path / "metrics.jsonl").stat().st_size + 50, "the lines have room"
    resource.setrlimit(resource.RLIMIT_FSIZE, (events.stat().st_size + 10, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            log.log(1, {"b": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
    log.close()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2


def move_away(folder: Path) -> None:
    folder.rename(folder.with_name(f"{folder.name}_aside"))


def put_another(folder: Path) -> None:
    move_away(folder)
    write_run(folder, {0: 0.5})


def test_numbers_that_json_lacks_are_strings_in_the_file_and_floats_when_read(tmp_path: Path):
    log = MetricsLog(tmp_path, DISABLED, {})
    log.log(0, {"nan": math.nan, "up": math.inf, "down": -math.inf})
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=refuse_constant) == {"step": 0, "nan": "NaN", "up": "Infinity", "down": "-Infinity"}
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(line["nan"]) and line["up"] == math.inf and line["down"] == -math.inf


def test_a_restart_at_step_k_leaves_what_an_unbroken_run_would(tmp_path: Path):
    write_run(tmp_path / "unbroken", {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0})
    write_run(tmp_path / "broken", {0: 0.0, 1: 1.0, 2: -9.0, 3: -9.0, 4: -9.0})
    with (tmp_path / "broken" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "reward/me')  # killed while writing
    time.sleep(1.1)  # TensorBoard sorts event files by second, then by a counter as text: the tenth file of a process precedes its ninth
    write_run(tmp_path / "broken", {2: 2.0, 3: 3.0}, start_step=2)
    unbroken, broken = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("unbroken", "broken"))
    assert broken == unbroken
    assert tensorboard_scalars(tmp_path / "broken", "reward/mean") == {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}
    assert list((tmp_path / "broken").glob(".*")) == []


def test_a_failed_rewrite_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.jsonl"
    write_lines_atomically(path, [{"a": 1}])

    def records():
        yield {"a": 2}
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_lines_atomically(path, records())

    def full(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        write_lines_atomically(path, [{"a": 2}])
    assert read_lines(path) == [{"a": 1}] and list(tmp_path.iterdir()) == [path]


def test_to_line_keeps_nesting_order_and_ascii():
    assert to_json_line({"b": [1, (2.5, math.nan)], "a": {"x": "\u00e9"}}) == '{"b": [1, [2.5, "NaN"]], "a": {"x": "\\u00e9"}}'


def test_wandb_disabled_imports_nothing_and_offline_leaves_its_run_file(tmp_path: Path):
    script = """
import sys
from pathlib import Path
from megatron_rl.config import WandbSettings
from megatron_rl.observe.metrics import MetricsLog
for mode in ("disabled", "offline"):
    log = MetricsLog(Path(sys.argv[1]) / mode, WandbSettings(mode=mode), {"algo": {"lr": 1e-3}})
    log.log(0, {"reward/mean": 0.5})
    log.close()
    assert ("wandb" in sys.modules) == (mode == "offline"), mode
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=200, capture_output=True)
    assert not (tmp_path / "disabled" / "wandb").exists()
    (run_file,) = (tmp_path / "offline").glob("wandb/offline-run-*/run-*.wandb")
    assert (tmp_path / "offline" / "wandb_id").read_text() in run_file.name
    assert b"reward/mean" in run_file.read_bytes()


def test_wandb_is_shown_what_the_best_and_the_worst_said(tmp_path: Path):
    """Read the tables that the wandb package wrote: one table per step, the first image of each
    rollout next to its text, and no image if its file is missing.
    """
    script = """
import sys
from pathlib import Path
from megatron_rl.config import WandbSettings
from megatron_rl.observe.metrics import MetricsLog
from megatron_rl.observe.recorder import IMAGES_FOLDER, ROLLOUTS_FOLDER, save_images
from tests.observe.test_recorder import picture, rollout
run = Path(sys.argv[1])
said = ((0, 1.0, "+"), (1, -1.0, "<b>"), (2, 0.5, "-"))
seen, absent, mute = (rollout(number, reward, images=(picture(number),), text=text) for number, reward, text in said)
save_images(run / ROLLOUTS_FOLDER, [seen])
log = MetricsLog(run, WandbSettings(mode="offline"), {})
log.log_rollouts(7, {"best": [seen], "worst": [absent]}, image_folder=run / ROLLOUTS_FOLDER / IMAGES_FOLDER)
log.log_rollouts(8, {"best": [], "worst": []}, image_folder=run / ROLLOUTS_FOLDER / IMAGES_FOLDER)
log.log_rollouts(9, {"best": [mute]}, image_folder=run / ROLLOUTS_FOLDER / IMAGES_FOLDER)
log.close()
"""
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=True, timeout=200, capture_output=True, cwd=Path(__file__).parents[2]
    )
    waiting = [path.read_bytes() for path in (tmp_path / "wandb/artifacts/staging").iterdir()]
    tables = {table["data"][0][0]: table for table in (json.loads(data) for data in waiting if data.startswith(b"{"))}
    (_, first), (_, second) = sorted(tables.items())
    assert first["columns"] == second["columns"] == ["step", "kind", "example", "sample", "reward", "end", "picture", "content"]
    (best, worst), (last,) = ([row[:6] + row[7:] for row in table["data"]] for table in (first, second))
    assert best == [7, "best", "1-4", 0, 1.0, "done", "+"] and worst == [7, "worst", "1-4", 1, -1.0, "done", "<b>"]
    assert last == [9, "best", "1-4", 2, 0.5, "done", "-"]
    shown, *others = [row[6] for table in (first, second) for row in table["data"]]
    assert others == [None, None] and (shown["width"], shown["height"]) == (56, 28)
    (stored,) = {data for data in waiting if hashlib.sha256(data).hexdigest() == shown["sha256"]}
    with Image.open(io.BytesIO(stored)) as file:
        assert file.convert("RGB").tobytes() == picture(0).pil.tobytes()


def test_trackio_has_what_an_unbroken_run_would_have_given_it(tmp_path: Path):
    """The trackio package, offline, stores the same metrics as for an uninterrupted run. An attempt
    of three steps is followed by one that resumes at step 1, and by a run with the same name in
    another folder.
    """
    script = """
import sys
from pathlib import Path
from megatron_rl.config import TrackioSettings, WandbSettings
from megatron_rl.observe.metrics import MetricsLog
from megatron_rl.run.superseded_steps import supersede_records
mode, folder, start_step, *losses = sys.argv[1:]
supersede_records(Path(folder), first_step=int(start_step), first_line=int(start_step), num_steps=9, results=(), models=())
settings = TrackioSettings(mode=mode, project="mine")
log = MetricsLog(Path(folder), WandbSettings(), {"algo": {"lr": 1e-3}}, trackio_settings=settings, start_step=int(start_step))
for step, loss in enumerate(losses, int(start_step)):
    log.log(step, {"loss": float(loss), "reward/mean": float("nan")})
log.close()
assert ("trackio" in sys.modules) == (mode == "local")
"""
    kept = tmp_path / "kept"
    environment = {**os.environ, "TRACKIO_DIR": str(kept), "HF_HUB_OFFLINE": "1"}

    def ran(code: str, *arguments: object) -> str:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        return subprocess.run(command, env=environment, check=True, timeout=200, capture_output=True, text=True).stdout

    ran(script, "disabled", tmp_path / "off" / "run", 0, 1.0)
    assert not kept.exists()
    ran(script, "local", tmp_path / "one" / "run", 0, 1.0, 2.0, 3.0)
    ran(script, "local", tmp_path / "two" / "run", 0, 7.0)
    ran(script, "local", tmp_path / "one" / "run", 1, 2.5, 3.5)
    reading = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage as storage
lines = {run.id: storage.get_logs("mine", run.name, run_id=run.id) for run in trackio.Api().runs("mine")}
print(json.dumps({run: [[line["step"], line["loss"], repr(line["reward/mean"])] for line in each] for run, each in lines.items()}))
"""
    ids = [(tmp_path / name / "run" / "trackio_id").read_text() for name in ("one", "two")]
    expected = {ids[0]: [[0, 1.0, "nan"], [1, 2.5, "nan"], [2, 3.5, "nan"]], ids[1]: [[0, 7.0, "nan"]]}
    assert json.loads(ran(reading).splitlines()[-1]) == expected


def test_spans_count_each_second_once():
    clock = Clock()
    spans = StepTimer(clock=clock)
    with spans("engine"):
        clock.now += 1
        with spans("environment"):
            clock.now += 2
        clock.now += 2
    clock.now += 1
    with spans("update"):
        clock.now += 2
    with spans("environment"):
        clock.now += 4
    clock.now += 2
    assert spans.collect() == {"time/engine": 3, "time/environment": 6, "time/update": 2, "time/unaccounted": 3, "time/total": 14}
    clock.now += 5
    assert spans.collect() == {"time/unaccounted": 5, "time/total": 5}


def test_seconds_added_inside_a_span_are_not_that_spans():
    """Seconds added to another metric within a span are subtracted from that span."""
    clock = Clock()
    spans = StepTimer(clock=clock)
    with spans("environment"):
        clock.now += 10
        spans.add_seconds("engine", 7)
    assert spans.collect() == {"time/environment": 3, "time/engine": 7, "time/unaccounted": 0, "time/total": 10}


def test_take_inside_an_open_span_splits_it():
    """collect() within an open span returns its time so far, and the span's later time goes to the
    next collect().
    """
    clock = Clock()
    spans = StepTimer(clock=clock)
    with spans("record"):
        clock.now += 1
        assert spans.collect() == {"time/record": 1, "time/unaccounted": 0, "time/total": 1}
        clock.now += 4
    assert spans.collect() == {"time/record": 4, "time/unaccounted": 0, "time/total": 4}


def test_a_span_ends_with_an_error_and_watchers_hear_every_start():
    """A span ends if its block raises, and on_span is called at the start of every span."""
    clock, heard = Clock(), []
    spans = StepTimer(clock=clock, on_span=heard.append)

    def fail() -> None:
        with spans("outer"), spans("inner"):
            clock.now += 3
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    clock.now += 1
    assert spans.collect() == {"time/inner": 3, "time/outer": 0, "time/unaccounted": 1, "time/total": 4}
    assert heard == ["outer", "inner"]


def test_plain_progress_is_one_aligned_line_a_step_with_the_time_left():
    """The time left is estimated from the steps after the first, which contains the start. After
    the first step, the displayed times of this step are used.
    """
    clock, stream = Clock(), io.StringIO()
    progress = ProgressDisplay(40, title="grpo", first_step=8, stream=stream, clock=clock)
    for step, reward, seconds in ((8, -10.5, 300), (9, 0.25, 30), (10, 0.5, 40)):
        progress.set_phase("engine")
        clock.now += seconds
        times = {"time/engine": 1.5, "time/environment": 0.25, "time/update": 0.8, "time/total": 50.0}
        progress.log_step(step, {"reward/mean": reward, "other": 7.0, **times})
    progress.close()
    # 2.55 s of the first step itself and 31 steps left; 30 s and 30 left; 35 s and 29 left
    assert stream.getvalue().splitlines() == [
        "grpo step  9/40  return  -10.500  rollouts    1.75  update   0.80  left 0:01:19",
        "grpo step 10/40  return   +0.250  rollouts    1.75  update   0.80  left 0:15:00",
        "grpo step 11/40  return   +0.500  rollouts    1.75  update   0.80  left 0:16:55",
    ]


def test_an_evaluation_reports_its_episodes():
    """Without a terminal, a line is printed at most every 30 s."""
    clock, stream = Clock(), io.StringIO()
    progress = ProgressDisplay(40, title="grpo", stream=stream, clock=clock)
    for done in range(1, 8):
        clock.now += 10
        progress.log_episodes(done, 270)
    assert stream.getvalue().splitlines() == ["evaluate: 3/270 episodes", "evaluate: 6/270 episodes"]


METRICS = {
    "reward/mean": 0.5, "loss": 0.1, "rollout_mismatch/logprob_abs_diff_max": 1e-6, "time/engine": 1.5, "time/update": 0.25,
    "time/sync": 0.01,
}  # fmt: skip


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (200, "grpo step 1/4  return   +0.500  loss    0.1000  gap  1.0e-06  rollouts    1.50  update   0.25  sync  0.010  left 0:00:05"),
        (80, "grpo step 1/4  return   +0.500  loss    0.1000  gap  1.0e-06  left 0:00:05"),
        (40, "grpo step 1/4  return   +0.500  left 0:00:05"),
    ],
)
def test_a_terminal_keeps_the_lines_of_steps_above_a_bar(width: int, line: str, monkeypatch: pytest.MonkeyPatch):
    """Narrow terminals lose the last columns of the line; step, return and time left stay. The bar
    is not cut either.
    """
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    clock, stream = Clock(), Terminal()
    progress = ProgressDisplay(4, title="grpo", stream=stream, clock=clock)
    progress.set_phase("update")
    clock.now += 60
    progress.log_step(0, METRICS)
    progress.log_episodes(12, 270)
    progress.close()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).replace("\r", "\n")
    lines = plain.splitlines()
    assert line in lines and "\u2026" not in plain
    last = lines[-1]
    for word in ("grpo", "1/4", "left 0:00:05", "return   +0.500", *(["evaluate 12/270", "25%"] if width >= 80 else [])):
        assert word in last, last
    assert len(last) <= width


def test_smooth_by_hand():
    assert moving_average([0, 3, 6], window=3) == [1.5, 3, 4.5]
    assert moving_average([1, 2, 4, 8, 16], window=1) == [1, 2, 4, 8, 16]
    assert moving_average([5.0, 1.0], window=9) == [3.0, 3.0]


def color_share(path: Path, rgb: tuple[int, int, int]) -> float:
    """Return the fraction of pixels that have exactly this color."""
    pixels = np.asarray(Image.open(path).convert("RGB"))
    return float((pixels == np.array(rgb)).all(-1).mean())


BLUE, ORANGE = (31, 119, 180), (255, 127, 14)  # matplotlib's C0 and C1


def test_a_curve_a_run_in_its_own_color(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_run(tmp_path / "a", {step: step / 10 for step in range(20)})
    write_run(tmp_path / "b", {step: 1 - step / 20 for step in range(20)})
    plot_reward_curves({"a": tmp_path / "a" / "metrics.jsonl"}, tmp_path / "one.png")
    assert color_share(tmp_path / "one.png", BLUE) > 1e-3 and color_share(tmp_path / "one.png", ORANGE) == 0
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    both = tmp_path / "a" / "reward_curve.png"
    assert capsys.readouterr().out == f"{both}\n"
    assert color_share(both, BLUE) > 1e-3 and color_share(both, ORANGE) > 1e-3


def test_plot_of_a_run_without_returns_or_without_metrics_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    log = MetricsLog(tmp_path / "sft", DISABLED, {})
    log.log(0, {"loss": 1.0})
    log.close()
    assert main([str(tmp_path / "sft")]) == 2
    assert "contains no reward/mean" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert list(tmp_path.glob("**/*.png*")) == []
