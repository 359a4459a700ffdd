"""launch/sweep.py and its report, with a fake launcher: when settings are composed, which runs are
started, and what is reported for each.

tests/e2e/test_slurm_cluster.py runs a sweep on a real cluster.
"""

import json
import math
import os
import re
import signal
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_rl.launcher.compose import compose_settings
from megatron_rl.launcher.sweep import LaunchScripts, sweep_main
from megatron_rl.launcher.sweep_report import format_success, main, success_interval, wilson_interval
from megatron_rl.launcher.sweep_report import load_rows as rows
from tests.conftest import ROOT
from tests.run.test_directory import leave
from tests.support import fork_server

SPAWN = """
import json, os, signal, sys, time
words = dict(word.partition("=")[::2] for word in sys.argv[1:] if "=" in word)
folder, how = words["run.dir"], words["run.seed"]

def at(seed, what):
    return os.path.join("runs", f"run.seed_{seed}", what)

def leave(what):
    with open(os.path.join(folder, what), "w"):
        pass

leave("began")
if how == "1":
    print("error: run.seed=1: told so\\nwandb: bye\\nerror: run.seed=1: told so")
    sys.exit(1)
if how == "2":
    def stop(*_):
        time.sleep(1.0 if "steps" in folder else 0.0)
        print("stopped at step 1 of 4; the same command resumes the run", flush=True)
        sys.exit(75)
    signal.signal(signal.SIGUSR1, stop)
    print("ready", flush=True)
    time.sleep(60)
if how in ("5", "6"):
    while not (os.path.exists(at(5, "began")) and os.path.exists(at(6, "began"))):
        time.sleep(0.02)
if how == "7":
    leave("after one" if os.path.exists(at(5, "ended")) or os.path.exists(at(6, "ended")) else "too early")
leave("ended")
print("done: greedy 50.0%")
"""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder with a fake launch/launch.py. run.seed selects its behavior: 1 fails, 2 waits
    until it is stopped, 5 and 6 wait for each other, all other seeds finish.
    """
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "launch.py").write_text(SPAWN)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def write(text: str) -> str:
    Path("sweep.yaml").write_text(f"overrides: [experiment=numberline_grpo_cpu, run.steps=4]\nfolder: runs\n{text}\n")
    return "sweep.yaml"


def play(bench: Path, *words: str) -> int:
    return sweep_main(["sweep.yaml", *words], launch=bench / "launch")


def test_all_are_composed_before_any_begins(bench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All tasks are composed before any run starts: each invalid task is reported in one line, and
    no run directory is created.
    """
    write("list: [{run.seed: 0}, {optim.lr: fast}, {algo: grop}, {optim.lr: fast, run.seed: 5}, {filter.drop: 'a,b'}]")
    for words in (["--print"], ["--local", "2"], ["--task", "0"]):
        assert play(bench, *words) == 1
        said = capsys.readouterr()
        assert said.out == "" and said.err.splitlines() == [
            "error: optim.lr=fast: expects a number (task 1)",
            "error: algo=grop: no such algo; did you mean grpo? --help lists all (task 2)",
            "error: filter.drop=a,b: contains a comma; write 'filter.drop=[a,b]'; "
            "put an entry that contains a comma into double quotes (task 4)",
        ]
    assert not Path("runs").exists()
    write("grid: {run.seed: [3, 3]}")
    assert play(bench, "--local", "2") == 1
    assert capsys.readouterr().err.startswith("error: sweep.yaml: run.dir=runs/run.seed_3: is used by tasks 0, 1; ")
    write("grid: {run.seed: [3]}")
    assert play(bench, "--task", "1") == 1
    assert capsys.readouterr().err == "error: --task=1: sweep.yaml has tasks 0 to 0; use sbatch --array=0-0\n"
    assert play(bench, "--task", "0", "--requeue") == 1
    assert capsys.readouterr().err.startswith("error: --requeue: this process is not in a Slurm job; ")
    assert not Path("runs").exists()


def test_a_folder_that_cannot_go_on_is_told_before_any_begins(bench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("grid: {run.seed: [0, 3]}")
    leave(Path("runs/run.seed_3"), "steps checkpoint")
    assert play(bench, "--local", "1") == 1
    assert re.match(
        r"error: run.dir=runs/run.seed_3: contains a run with other settings: .*optim.lr=0.0002 \(was ", capsys.readouterr().err
    )
    assert not Path("runs/run.seed_0").exists()


def test_the_tasks_are_shown(bench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("grid: {optim.lr: [1e-4, 2e-4]}")
    leave(Path("runs/optim.lr_2e-4"), "steps")
    assert play(bench, "--print") == 0
    assert capsys.readouterr().out.splitlines() == [
        "  0  waiting   runs/optim.lr_1e-4  experiment=numberline_grpo_cpu run.steps=4 optim.lr=1e-4",
        "  1  failed    runs/optim.lr_2e-4  experiment=numberline_grpo_cpu run.steps=4 optim.lr=2e-4",
        "sbatch --array=0-1 launch/slurm/sweep.sbatch sweep.yaml",
    ]


def test_so_many_at_once_and_a_line_for_each(bench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At most two runs are active at once. The runs with seeds 5 and 6 wait for each other, and the
    run with seed 7 checks that one of them has ended. A failed run is started again with its task
    number and fails again.
    """
    write("grid: {run.seed: [5, 6, 1, 7]}")
    assert play(bench, "--local", "2") == 1
    said = capsys.readouterr().out.splitlines()
    assert sorted(said) == sorted([
        *(f"{index:>3}  starting: runs/run.seed_{seed}/logs/attempt_1/output.txt" for index, seed in enumerate((5, 6, 1, 7))),
        *(f"{index:>3}  done: greedy 50.0%  (runs/run.seed_{seed})" for index, seed in ((0, 5), (1, 6), (3, 7))),
        "  2  error: run.seed=1: told so  (runs/run.seed_1)",
    ])  # fmt: skip
    assert Path("runs/run.seed_7/after one").exists()
    assert main(["sweep.yaml"]) == 0
    assert "2: run.seed=1: told so  (runs/run.seed_1)" in capsys.readouterr().out
    assert play(bench, "--task", "2") == 1
    assert capsys.readouterr().out.splitlines()[0] == "  2  starting: runs/run.seed_1/logs/attempt_2/output.txt"


def test_what_is_finished_is_left_alone(bench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that finished with these settings is not started again, but it is started if the sweep
    now has more steps.
    """
    write("grid: {run.seed: [0]}")
    folder = Path("runs/run.seed_0")
    words = ["experiment=numberline_grpo_cpu", "run.steps=4", "run.seed=0", f"run.dir={folder}"]
    leave(folder, "steps checkpoint finished")
    (folder / "config.yaml").write_text(yaml.safe_dump(asdict(compose_settings(words))))
    assert play(bench, "--local", "2") == 0 and capsys.readouterr().out == "  0  is finished  (runs/run.seed_0)\n"
    assert not (folder / "began").exists()
    Path("sweep.yaml").write_text(Path("sweep.yaml").read_text().replace("run.steps=4", "run.steps=5"))
    assert play(bench, "--local", "2") == 0 and (folder / "began").exists()


def test_a_stopped_sweep_begins_no_other(bench: Path) -> None:
    """Stopping a sweep stops both active runs and starts no other run. Killing a sweep leaves no
    process behind.
    """
    write("list: [{run.seed: 2}, {run.seed: 2, run.steps: 4}, {run.seed: 0}]")
    script = bench / "launch" / "sweep.py"
    script.write_text((ROOT / "launch" / "sweep.py").read_text())
    outputs = [Path(f"runs/{name}/logs/latest/output.txt") for name in ("run.seed_2", "run.seed_2+run.steps_4")]

    def begin() -> fork_server.Process:
        sweep = fork_server.Process(script, "sweep.yaml", "--local", "2", cwd=Path.cwd())
        deadline = time.monotonic() + 60
        while not all(output.exists() and "ready" in output.read_text().splitlines()[-1:] for output in outputs):
            assert time.monotonic() < deadline and sweep.poll() is None, sweep.output.read_text()
            time.sleep(0.02)
        return sweep

    sweep = begin()
    sweep.send_signal(signal.SIGTERM)
    said, _ = sweep.communicate(timeout=30)
    assert sweep.returncode == os.EX_TEMPFAIL and said.count("stopped at step 1 of 4; the same command resumes the run") == 2
    assert not Path("runs/run.seed_0").exists()
    states = [row.status.state for row in rows(Path("sweep.yaml"))]
    assert states == ["stopped", "stopped", "waiting"]

    sweep = begin()
    children = psutil.Process(sweep.pid).children()
    assert len(children) == 2
    sweep.kill()
    psutil.wait_procs(children, timeout=5)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


def test_where_a_job_has_several_nodes_they_all_take_part() -> None:
    """A sweep task on one node uses launch.py; in a Slurm job with several nodes it
    uses nodes.sh.
    """
    launch = LaunchScripts(Path("launch"))
    alone = launch.command(["a=1"], processes=0, environment={"SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "4"})
    assert alone[1:] == ["launch/launch.py", "--standalone", "--local-addr", "127.0.0.1", "--nproc_per_node", "4", "launch/train.py", "a=1"]
    assert launch.command(["a=1"], processes=2, environment={})[6] == "2"
    many = launch.command(["a=1"], processes=2, environment={"SLURM_NNODES": "2"})
    assert many == ["bash", "launch/slurm/nodes.sh", "--nproc_per_node=2", "a=1"]


def test_an_interval_is_wilsons() -> None:
    """Oracle: each bound of the interval lies 1.96 of its own standard errors from the observed
    fraction. A published example, 8 of 10, is also compared.
    """
    for share, num in ((0.8, 10), (0.0, 5), (1.0, 7), (0.31, 48)):
        for bound in wilson_interval(share, num):
            assert abs(share - bound) == pytest.approx(1.959964 * math.sqrt(bound * (1 - bound) / num), abs=1e-9)
    assert wilson_interval(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert success_interval({"greedy_success": 0.5}, "greedy") is None, "a success that is of no sample"
    both = {"greedy_success": 0.5, "greedy_episodes": 5.0, "sampled_success": 0.8, "sampled_episodes": 10.0}
    assert format_success(both, "sampled") == "80.0% (49.0-94.3)"


def test_a_table_of_a_folder(bench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report of a folder contains the settings that differ between its runs, also for a run
    without an evaluation, and a plot.
    """
    for name, rate, steps in (("one", 0.25, 2), ("two", 0.5, 3)):
        folder = Path("runs") / name
        leave(folder, "steps checkpoint" + (" finished" if name == "two" else ""))
        config = (folder / "config.yaml").read_text().replace("lr: 1.0e-06", f"lr: {rate}")
        (folder / "config.yaml").write_text(config)
        lines = [{"step": step, "reward/mean": float(step), "time/total": 900.0} for step in range(steps)]
        lines += [{"step": 40, "eval/greedy_success": 0.8, "eval/greedy_episodes": 10.0, "eval/sampled_success": 0.5}] * (name == "two")
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path("runs/empty").mkdir()
    assert main(["runs"]) == 0
    said = capsys.readouterr().out
    table = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in said.splitlines() if line[:1] in "│┃"]
    assert table == [
        ["run", "optim.lr", "greedy", "sampled", "steps", "hours", "state"],
        ["one", "0.25", "", "", "2/40", "0.50", "failed"],
        ["two", "0.5", "80.0% (49.0-94.3)", "50.0%", "40/40", "0.75", "finished"],
    ]
    assert said.splitlines()[-3:] == [
        "one: ended without an error message; it may have been killed  (runs/one)",
        "1 finished, 1 failed",
        "runs/sweep.png",
    ]
    assert Path("runs/sweep.png").read_bytes()[:4] == b"\x89PNG"
    for words, line in ((["nowhere"], "nowhere: no such file or folder"), (["runs/empty"], "runs/empty: contains no run")):
        assert main(words) == 1 and capsys.readouterr().err.startswith(f"error: {line}")
