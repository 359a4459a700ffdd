"""A sweep as an array on a real Slurm of two nodes (tests/support/slurm.py): one task runs through, one is stopped as before a time limit
and comes back, one fails. What is longer stands in test_slurm_long.py.
"""

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.observe.metrics import read_metrics
from tests.conftest import ROOT
from tests.support.slurm import OVER, Cluster, cluster, lacking

TINY = (
    "model.min_pixels=3136", "model.max_pixels=4000", "engine.kv_cache_mib=16", "task.max_turns=1", "task.max_tokens_per_turn=4",
    "task.eval_samples=1", "batch.prompts_per_step=2", "batch.group_size=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    """Skipped where no cluster can be started, which is said loudly."""
    why = lacking()
    if why:
        warnings.warn(f"no Slurm, its tests are skipped: {why}", stacklevel=1)
        pytest.skip(why)
    with cluster() as started:
        yield started


@pytest.fixture(scope="module")
def tree(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like this repository's, to submit from: what jobs write stays out of ours."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("launch", "tools", "configs"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def wait_for_steps(run: Path, num: int) -> None:
    deadline = time.monotonic() + 150
    while not ((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text().count("\n") >= num):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def words_of(tree: Path) -> str:
    """All that the jobs said, for a test that fails."""
    return "\n".join(f"{path}:\n{path.read_text()}" for path in [*tree.glob("*.out"), *tree.glob("runs/**/output.txt")])


def check_equal(resumed: Path, unbroken: Path) -> None:
    """Metrics but for seconds, evaluation, weights."""
    left, expected = (
        [{name: value for name, value in line.items() if not name.startswith("time/")} for line in read_metrics(run / "metrics.jsonl")]
        for run in (resumed, unbroken)
    )
    assert left == expected and len(expected) > 3
    assert (resumed / "eval.json").read_bytes() == (unbroken / "eval.json").read_bytes()
    weights = [[path.read_bytes() for path in sorted((run / "final").glob("*.safetensors"))] for run in (resumed, unbroken)]
    assert weights[0] == weights[1] != []


def test_an_array_of_three(slurm: Cluster, tree: Path, random_model: Path) -> None:
    """The runs of tasks 0 and 1 differ in nothing that is learned: the one that was stopped and came back equals the unbroken one."""
    (tree / "sweep.yaml").write_text(
        f"overrides: {json.dumps([f'model.path={random_model}', *TINY, 'run.steps=30'])}\n"
        "list: [{run.grace_s: 60}, {run.grace_s: 61}, {model.path: nowhere}]\n"
    )
    submitted = slurm.run("sbatch", "--parsable", "--array=0-2%2", "launch/slurm/sweep.sbatch", "sweep.yaml", "--requeue", cwd=tree)
    names = [f"{submitted.strip()}_{index}" for index in range(3)]
    unbroken, resumed, failed = (tree / "runs" / "sweep" / name for name in ("run.grace_s_60", "run.grace_s_61", "model.path_nowhere"))
    wait_for_steps(resumed, 1)
    slurm.run("scancel", "--batch", "--signal=USR1", names[1], cwd=tree)  # as Slurm does before a time limit
    jobs = slurm.wait(*names, states=OVER, timeout_s=200)
    told = words_of(tree)
    assert [(job.state, job.code, job.restarts) for job in jobs.values()] == [
        ("COMPLETED", "0:0", 0), ("COMPLETED", "0:0", 1), ("FAILED", "1:0", 0),
    ], told  # fmt: skip
    first, second = ((resumed / "logs" / f"attempt_{number}" / "output.txt").read_text() for number in (1, 2))
    assert "stopped at step " in first.splitlines()[-1] and "resume: " in second and "30/30" in second and " 1/30" not in second, told
    assert not (resumed / "ended.json").exists()
    check_equal(resumed, unbroken)
    table = slurm.run(sys.executable, "launch/sweep_table.py", "sweep.yaml", cwd=tree)
    assert "2: model.path=nowhere: " in table and "2 finished, 1 failed" in table and (tree / "runs" / "sweep" / "sweep.png").exists()
    assert failed.is_dir() and [path.name for path in failed.iterdir()] == ["logs"], "it came to no run"


def test_the_cluster_ends_with_who_started_it(slurm: Cluster) -> None:
    """However that ends: here by SIGKILL, with a job under way that is deaf."""
    code = (
        "import subprocess, sys, time; from pathlib import Path; from tests.support.slurm import cluster\n"
        "with cluster() as c:\n"
        "    job = c.run('sbatch', '--parsable', '--output=/dev/null', '--wrap', 'trap \"\" TERM; sleep 600', cwd=c.folder).strip()\n"
        "    c.wait(job, states=['RUNNING'])\n"
        "    print(c.folder, *c.processes(), flush=True); time.sleep(600)"
    )
    other = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
    folder, *pids = other.stdout.readline().decode().split()
    assert len(pids) >= 6 and all(Path(f"/proc/{pid}").exists() for pid in pids), "daemons, a shell and its sleep"
    other.kill()
    other.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)
    subprocess.run(["rm", "-r", folder], check=True)
