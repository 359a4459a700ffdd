"""Jobs on a real two-node Slurm cluster (tests/support/slurm.py): a sweep as a job array and a
judge service as a separate job.

One task of the array runs to its end, one is stopped as before a time limit and requeued, and one
fails. test_slurm_long.py contains the tests that take longer.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.services.address import address_file, find_address
from tests.conftest import ROOT
from tests.support.slurm import FINAL_STATES, Cluster
from tests.support.slurm_runs import TINY_OVERRIDES, check_equal_runs, read_outputs, wait_for_steps


@pytest.mark.timeout(600)
def test_an_array_of_three(slurm: Cluster, tree: Path, random_model: Path) -> None:
    """Tasks 0 and 1 train identically.

    The run that was stopped and requeued equals the uninterrupted run.
    """
    (tree / "sweep.yaml").write_text(
        f"overrides: {json.dumps([f'model.path={random_model}', *TINY_OVERRIDES, 'run.steps=30'])}\n"
        "list: [{run.grace_s: 60}, {run.grace_s: 61}, {model.path: nowhere}]\n"
    )
    submitted = slurm.run("sbatch", "--parsable", "--array=0-2%2", "launch/slurm/sweep.sbatch", "sweep.yaml", "--requeue", cwd=tree)
    names = [f"{submitted.strip()}_{index}" for index in range(3)]
    unbroken, resumed, failed = (tree / "runs" / "sweep" / name for name in ("run.grace_s_60", "run.grace_s_61", "model.path_nowhere"))
    wait_for_steps(resumed, 1)
    slurm.run("scancel", "--batch", "--signal=USR1", names[1], cwd=tree)  # as Slurm does before a time limit
    jobs = slurm.wait_for_jobs(*names, states=FINAL_STATES, timeout_s=400)
    told = read_outputs(tree)
    assert [(job.state, job.code, job.restarts) for job in jobs.values()] == [
        ("COMPLETED", "0:0", 0), ("COMPLETED", "0:0", 1), ("FAILED", "1:0", 0),
    ], told  # fmt: skip
    first, second = ((resumed / "logs" / f"attempt_{number}" / "output.txt").read_text() for number in (1, 2))
    assert "stopped at step " in first.splitlines()[-1] and "resume: " in second and "30/30" in second and " 1/30" not in second, told
    assert not (resumed / "ended.json").exists()
    check_equal_runs(resumed, unbroken)
    table = slurm.run(sys.executable, "launch/sweep_report.py", "sweep.yaml", cwd=tree)
    assert "2: model.path=nowhere: " in table and "2 finished, 1 failed" in table and (tree / "runs" / "sweep" / "sweep.png").exists()
    assert failed.is_dir() and [path.name for path in failed.iterdir()] == ["logs"], "it came to no run"


def test_a_judges_job_comes_back_and_ends_with_the_run(slurm: Cluster, tree: Path) -> None:
    """Uses a sandbox server, which starts within seconds, as the service; test_slurm_long.py uses
    vLLM. At its time limit the job is requeued and publishes a new address.
    """
    run = tree / "runs" / "judged"
    words = ["task=number_line", "model.path=nano", f"run.dir={run}", "services.sandbox={kind: sandbox, external: true, args: [--size,1]}"]
    command = ("sbatch", "--parsable", "--output=runs/judge.out", "launch/slurm/judge.sbatch", "--requeue")
    job = slurm.run(*command, *words, cwd=tree).strip()
    first = wait_for_address(tree, run)
    slurm.run("scancel", "--batch", "--signal=USR1", job, cwd=tree)
    slurm.wait_for_jobs(job, states=["PENDING"])
    assert not find_address(run, "sandbox", "sandbox")
    second = wait_for_address(tree, run)
    assert second != first
    (run / "final").mkdir()
    for name in ("eval.json", "final/config.json", "final/model.safetensors"):  # the files that a finished run leaves
        (run / name).write_text("{}")
    found = slurm.wait_for_jobs(job)[job]
    assert (found.state, found.code, found.restarts) == ("COMPLETED", "0:0", 1), read_outputs(tree)
    assert not address_file(run, "sandbox").exists() and not find_address(run, "sandbox", "sandbox")


def wait_for_address(tree: Path, run: Path) -> str:
    deadline = time.monotonic() + 120
    while not (url := find_address(run, "sandbox", "sandbox")):
        assert time.monotonic() < deadline, read_outputs(tree)
        time.sleep(0.2)
    return url


def test_the_cluster_ends_with_who_started_it(slurm: Cluster) -> None:
    """The cluster's processes end with the process that started it, even after SIGKILL and with a
    running job that ignores SIGTERM.
    """
    code = (
        "import subprocess, sys, time; from pathlib import Path; from tests.support.slurm import start_cluster\n"
        "with start_cluster() as c:\n"
        "    job = c.run('sbatch', '--parsable', '--output=/dev/null', '--wrap', 'trap \"\" TERM; sleep 600', cwd=c.folder).strip()\n"
        "    c.wait_for_jobs(job, states=['RUNNING'])\n"
        "    print(c.folder, *c.list_processes(), flush=True); time.sleep(600)"
    )
    other = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
    folder, *pids = other.stdout.readline().decode().split()
    alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]  # a helper that Slurm ran at the start of the job may have ended
    assert len(alive) >= 6, "daemons, a shell and its sleep"
    other.kill()
    other.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)
    subprocess.run(["rm", "-r", folder], check=True)
