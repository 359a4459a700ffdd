"""Long cluster scenarios on a real two-node Slurm cluster: the commands of docs/cluster.md
verbatim, time limits, preemption and cancellation.

By hand: `bash tests/run.sh -m long tests/e2e/test_slurm_long.py`; its log is
benchmarks/results/slurm_2026-11-22.md.
"""

import json
import shutil
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from megatron_rl.launcher.sweep_file import read_sweep
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.services.address import address_file
from tests.conftest import ROOT, start
from tests.support.comparable_metrics import drop_timings
from tests.support.documented_commands import extract_commands, indented_blocks
from tests.support.judge_service_overrides import JUDGE_ARGS, judge_run_overrides
from tests.support.slurm import Cluster
from tests.support.slurm_runs import TINY_OVERRIDES, check_equal_runs, read_outputs, wait_for_steps

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
WAIT_S = 900
STEPS = "run.steps=250"
"""Number of steps that a run cannot finish before Slurm enforces a time limit; Slurm checks the
limits twice a minute.
"""
DOCUMENT = (ROOT / "docs" / "cluster.md").read_text()
ELSEWHERE = ("bash launch/install.sh", "source .venv/bin/activate && export OMP_NUM_THREADS=1")
"""Commands of the document that are skipped because they only create the environment in which the
tests already run.
"""


def most_at_once(slurm: Cluster, names: list[str]) -> int:
    """Wait until all jobs have completed and return the largest number of them that ran at the same
    time.
    """
    most, deadline = 0, time.monotonic() + WAIT_S
    while True:
        jobs = slurm.read_jobs()
        most = max(most, sum(jobs[name].state == "RUNNING" for name in names if name in jobs))
        if all(name in jobs and jobs[name].state == "COMPLETED" for name in names):
            return most
        assert time.monotonic() < deadline, jobs
        time.sleep(0.3)


def test_the_document_as_printed(slurm: Cluster, tree: Path) -> None:
    """The document's commands work verbatim, from the login node to the running sweep (two tasks at
    a time) and to a run on two nodes. Submitting the finished sweep again changes nothing.
    """
    walk = next(block for block in indented_blocks(DOCUMENT) if block[0] == ELSEWHERE[0])
    assert len(walk) == 10
    for line in [line for line in walk if line not in ELSEWHERE and not line.startswith("scancel")]:
        said = slurm.run("bash", "-c", line, cwd=tree)
        print(line, said, sep="\n")
        if line.startswith("sbatch"):
            array = said.split()[-1]
        if "submit.py" in line:
            job = said.split()[1].removesuffix(":")
    names = [f"{array}_{index}" for index in range(4)]
    assert most_at_once(slurm, names) == 2
    assert slurm.wait_for_jobs(job, timeout_s=WAIT_S)[job].code == "0:0", read_outputs(tree)
    table = slurm.run(sys.executable, "launch/sweep_report.py", "launch/slurm/example.yaml", cwd=tree)
    print(table)
    assert "4 finished" in table

    before = {path: path.stat().st_mtime for path in tree.glob("runs/example/*/metrics.jsonl")}
    again = slurm.run("bash", "-c", next(line for line in walk if line.startswith("sbatch")), cwd=tree).split()[-1]
    slurm.wait_for_jobs(*(f"{again}_{index}" for index in range(4)), timeout_s=WAIT_S)
    assert {path: path.stat().st_mtime for path in tree.glob("runs/example/*/metrics.jsonl")} == before
    assert all("is finished" in (tree / "runs" / f"slurm-{again}_{index}.out").read_text() for index in range(4))
    slurm.run("bash", "-c", walk[-1], cwd=tree)


def test_slurm_takes_every_other_command(slurm: Cluster, tree: Path) -> None:
    """Slurm accepts the document's commands for GPU machines:

    `sbatch --test-only` reports a start time for each of them and for the script that
    launch/submit.py writes.
    """
    jobs = [line for line in extract_commands(DOCUMENT) if line.startswith("sbatch")]
    assert len(jobs) == 5
    for line in jobs:
        assert "to start at" in slurm.run("bash", "-c", line.replace("sbatch", "sbatch --test-only", 1), cwd=tree)
    dry = next(line for line in extract_commands(DOCUMENT) if "--dry-run" in line and "submit.py" in line)
    script = slurm.run("bash", "-c", f"{dry} run.dir=runs/dry", cwd=tree).strip()
    assert "to start at" in slurm.run("sbatch", "--test-only", script, cwd=tree)


def test_two_nodes_are_one_world(slurm: Cluster, tree: Path, random_model: Path) -> None:
    """A run on two nodes equals a run of two processes on one node, up to rounding (1e-5).

    After a stop and a requeue it equals the uninterrupted two-node run, bit for bit.
    """
    words = [f"model.path={random_model}", *TINY_OVERRIDES, "run.steps=20"]
    submitted = {}
    for name in ("two", "back"):
        command = ["sbatch", "--parsable", "--nodes=2", f"--output=runs/{name}.out", "launch/slurm/train.sbatch", "--requeue"]
        submitted[name] = slurm.run(*command, *words, f"run.dir=runs/{name}", cwd=tree).strip()
    wait_for_steps(tree / "runs" / "back", 2, timeout_s=WAIT_S)
    slurm.run("scancel", "--batch", "--signal=USR1", submitted["back"], cwd=tree)
    jobs = slurm.wait_for_jobs(*submitted.values(), timeout_s=WAIT_S)
    said = (tree / "runs" / "back.out").read_text()
    print(said)
    assert [(jobs[job].code, jobs[job].restarts) for job in submitted.values()] == [("0:0", 0), ("0:0", 1)], read_outputs(tree)
    assert "stopped at step " in said and "requeueing job " in said and "resume: runs/back/checkpoints/step_" in said
    check_equal_runs(tree / "runs" / "back", tree / "runs" / "two")
    start(2, ROOT / "launch" / "train.py", *words, f"run.dir={tree}/runs/one", timeout_s=WAIT_S)
    two, one = ([drop_timings(line) for line in read_metrics(tree / "runs" / name / "metrics.jsonl")] for name in ("two", "one"))
    assert len(two) == 21 and two == [pytest.approx(line, rel=1e-5, abs=1e-5) for line in one]


@pytest.fixture(scope="module")
def unbroken(slurm: Cluster, tree: Path, random_model: Path) -> Path:
    """A run that was never interrupted."""
    folder = tree / "runs" / "unbroken"
    words = [f"model.path={random_model}", *TINY_OVERRIDES, STEPS, f"run.dir={folder}"]
    job = slurm.run("sbatch", "--parsable", "--output=runs/unbroken.out", "launch/slurm/train.sbatch", *words, cwd=tree).strip()
    assert slurm.wait_for_jobs(job, timeout_s=WAIT_S)[job].code == "0:0", read_outputs(tree)
    return folder


def test_a_time_limit_requeues_and_changes_nothing(slurm: Cluster, tree: Path, random_model: Path, unbroken: Path) -> None:
    """A job of launch/submit.py gets a time limit of four minutes from now during training, and
    Slurm signals it five minutes before its end. The requeued run equals the uninterrupted run.
    """
    folder = tree / "runs" / "limited"
    words = [
        f"model.path={random_model}",
        *TINY_OVERRIDES,
        STEPS,
        f"run.dir={folder}",
        "slurm.time=1:00:00",
        "slurm.signal_s=300",
        "slurm.requeue=true",
    ]
    job = slurm.run(sys.executable, "launch/submit.py", *words, cwd=tree).split()[1].removesuffix(":")
    began = time.monotonic()
    wait_for_steps(folder, 5, timeout_s=WAIT_S)
    minutes = int((time.monotonic() - began) / 60) + 4
    slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}", cwd=tree)
    slurm.wait_for_jobs(job, states=["PENDING"], timeout_s=WAIT_S)
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=60", cwd=tree)
    found = slurm.wait_for_jobs(job, timeout_s=WAIT_S)[job]
    lives = [path.read_text() for path in sorted(folder.glob("logs/attempt_*/output.txt"))]
    print(*lives, (folder / "logs" / f"slurm-{job}.out").read_text(), sep="\n")
    assert (found.state, found.code, found.restarts, len(lives)) == ("COMPLETED", "0:0", 1, 2), read_outputs(tree)
    assert "\nstopped at step " in lives[0] and "\ndone: " in lives[1], "srun has the last word where it ends a step"
    check_equal_runs(folder, unbroken)


def test_who_is_preempted_comes_back(slurm: Cluster, tree: Path, random_model: Path, unbroken: Path) -> None:
    """A job of a higher-priority partition takes all processors of both nodes.

    The preempted job is requeued, and its run equals the uninterrupted run.
    """
    folder = tree / "runs" / "preempted"
    words = [f"model.path={random_model}", *TINY_OVERRIDES, STEPS, f"run.dir={folder}"]
    command = ["sbatch", "--parsable", "--output=runs/preempted.out", "launch/slurm/train.sbatch", "--requeue"]
    job = slurm.run(*command, *words, cwd=tree).strip()
    wait_for_steps(folder, 5, timeout_s=WAIT_S)
    urgent = ["--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 2"]
    other = slurm.run("sbatch", *urgent, cwd=tree).strip()
    slurm.wait_for_jobs(other, timeout_s=WAIT_S)
    found = slurm.wait_for_jobs(job, timeout_s=WAIT_S)[job]
    assert (found.state, found.code, found.restarts) == ("COMPLETED", "0:0", 1), read_outputs(tree)
    assert "stopped at step " in (tree / "runs" / "preempted.out").read_text()
    check_equal_runs(folder, unbroken)


def test_a_judge_is_a_job_of_its_own(slurm: Cluster, tree: Path, random_model: Path) -> None:
    """The run waits for the address that the judge's job publishes and gets its verdicts from that
    judge. The judge's job ends when the run ends.
    """
    home, daemons = tree / "judged", len(slurm.list_processes())
    home.mkdir()
    judge = f"services.judge={{kind: vllm, model: {random_model}, external: true, args: {JUDGE_ARGS}}}"
    words = [*judge_run_overrides(home, random_model), judge, "run.steps=4"]
    jobs = {}
    for name in ("train", "judge"):
        command = ["sbatch", "--parsable", "--export=ALL,TORCHDYNAMO_DISABLE=1", f"--output=runs/{name}.out", f"launch/slurm/{name}.sbatch"]
        jobs[name] = slurm.run(*command, "--requeue", *words, cwd=tree).strip()
    found = slurm.wait_for_jobs(*jobs.values(), timeout_s=WAIT_S)
    print(*((tree / "runs" / f"{name}.out").read_text() for name in jobs), sep="\n")
    assert [(job.state, job.code, job.restarts) for job in found.values()] == [("COMPLETED", "0:0", 0)] * 2, read_outputs(tree)
    with closing(sqlite3.connect(home / "verdicts.sqlite")) as verdicts:
        assert verdicts.execute("SELECT DISTINCT model FROM verdicts").fetchall() == [("judge",)]
    assert len(read_metrics(home / "run" / "metrics.jsonl")) == 5 and not address_file(home / "run", "judge").exists()
    assert len(slurm.list_processes()) == daemons


def test_canceled_and_failed_tasks_are_submitted_again(slurm: Cluster, tree: Path, random_model: Path) -> None:
    """One task is canceled during training and one fails because its model is missing.

    No process is left, and the same command resumes the first task and runs the second.
    """
    daemons, model = len(slurm.list_processes()), tree / "model"
    overrides = json.dumps([f"model.path={random_model}", *TINY_OVERRIDES, "run.steps=100"])
    text = f"overrides: {overrides}\nlist: [{{}}, {{model.path: {model}}}]\n"
    (tree / "again.yaml").write_text(text)
    command = ("sbatch", "--parsable", "--array=0-1", "--output=runs/%A_%a.out", "launch/slurm/sweep.sbatch", "again.yaml", "--requeue")
    array = slurm.run(*command, cwd=tree).strip()
    slurm.wait_for_jobs(f"{array}_1", states=["FAILED"], timeout_s=WAIT_S)
    canceled, failed = (tree / task.folder for task in read_sweep(tree / "again.yaml").tasks)
    wait_for_steps(canceled, 5, timeout_s=WAIT_S)
    slurm.run("scancel", array, cwd=tree)
    assert slurm.wait_for_jobs(f"{array}_0", timeout_s=120)[f"{array}_0"].state == "CANCELLED"
    deadline = time.monotonic() + 60
    while len(slurm.list_processes()) > daemons:
        assert time.monotonic() < deadline, "someone was left behind"
        time.sleep(0.5)
    time.sleep(15)
    assert slurm.read_jobs()[f"{array}_0"].state == "CANCELLED", "it does not come back by itself"
    table = slurm.run(sys.executable, "launch/sweep_report.py", "again.yaml", cwd=tree)
    print(table)
    assert "1 stopped, 1 failed" in table and f"1: model.path={model}: " in table

    shutil.copytree(random_model, model)
    again = slurm.run(*command, cwd=tree).strip()
    assert {job.code for job in slurm.wait_for_jobs(f"{again}_0", f"{again}_1", timeout_s=WAIT_S).values()} == {"0:0"}, read_outputs(tree)
    table = slurm.run(sys.executable, "launch/sweep_report.py", "again.yaml", cwd=tree)
    print(table)
    assert "2 finished" in table
    assert "resume: " in (canceled / "logs" / "attempt_2" / "output.txt").read_text()
    check_equal_runs(canceled, failed)
