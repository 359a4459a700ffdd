"""A two-node job on a real Slurm cluster. A fake launcher that only records its arguments and the
signals it receives replaces the trainer, so no engine is needed.

test_slurm_long.py runs training on two nodes.
"""

import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.slurm import Cluster

SPAWN = """
import os, signal, sys, time
node = next(word for word in sys.argv if word.startswith("--node_rank="))[-1]
folder = next(word for word in sys.argv if word.startswith("run.dir="))[8:]
life = os.environ.get("SLURM_RESTART_COUNT", "0")
seed = next(word for word in sys.argv if word.startswith("run.seed="))[9:]

def hear(number, frame):
    with open(os.path.join(folder, f"heard_{signal.Signals(number).name}_{life}_{node}"), "w"):
        pass  # srun, which is canceled too, may not hand on what is said now
    heard_by_node_1 = os.path.join(folder, f"heard_SIGUSR1_{life}_1")
    deadline = time.monotonic() + 20
    while number == signal.SIGUSR1 and not os.path.exists(heard_by_node_1) and time.monotonic() < deadline:
        time.sleep(0.05)  # the first end ends the job: --kill-on-bad-exit
    time.sleep(2 * int(node))
    sys.exit(75)

for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, hear)
with open(os.path.join(folder, f"life_{life}_node_{node}"), "w") as file:
    file.write("\\n".join(sys.argv[1:]))
if life == "1":
    sys.exit(0)
if seed == "1" and node == "1":
    print("error: node 1 fails", flush=True)
    sys.exit(3)
time.sleep(300)
"""


@pytest.fixture(scope="module")
def bench(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    (folder / "launch").mkdir()
    for name in ("submit.py", "attempt.py", "slurm"):
        (folder / "launch" / name).symlink_to(ROOT / "launch" / name)
    (folder / "launch" / "launch.py").write_text(SPAWN)
    return folder


def submit(slurm: Cluster, bench: Path, *words: str) -> str:
    given = ("experiment=numberline_grpo_cpu", "slurm.nodes=2", "slurm.requeue=true", *words)
    return slurm.run(sys.executable, "launch/submit.py", *given, cwd=bench).split()[1].removesuffix(":")


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < deadline, paths
        time.sleep(0.05)


def test_both_nodes_are_told_where_to_meet_and_when_to_stop(slurm: Cluster, bench: Path) -> None:
    """One launcher runs per node.

    A SIGUSR1 to the batch shell reaches both launchers, and the job is requeued and restarts with
    the same arguments.
    """
    run = bench / "two"
    job = submit(slurm, bench, "run.dir=two", "run.seed=0", "slurm.processes=3", "slurm.time=10")
    wait_for(*(run / f"life_0_node_{node}" for node in (0, 1)))
    slurm.run("scancel", "--batch", "--signal=USR1", job, cwd=bench)
    found = slurm.wait_for_jobs(job)[job]
    said = [(run / "logs" / f"attempt_{number}" / "output.txt").read_text() for number in (1, 2)]
    around = (run / "logs" / f"slurm-{job}.out").read_text()
    assert (found.state, found.code, found.restarts) == ("COMPLETED", "0:0", 1), [said, around]
    assert {path.name for path in run.glob("heard_SIGUSR1_*")} == {"heard_SIGUSR1_0_0", "heard_SIGUSR1_0_1"}
    assert f"job {job} after 0 restarts" in around
    meet = ["--nnodes=2", "--master_addr=n1", f"--master_port={20000 + int(job) % 10000}"]
    words = ["experiment=numberline_grpo_cpu", "slurm.nodes=2", "slurm.requeue=true", "run.dir=two", "run.seed=0"]
    for life in (0, 1):
        for node in (0, 1):
            expected = [f"--node_rank={node}", *meet, "--nproc_per_node=1", "--nproc_per_node=3", "launch/train.py", *words]
            told = (run / f"life_{life}_node_{node}").read_text().splitlines()
            assert told == [*expected, "slurm.processes=3", "slurm.time=10"]


@pytest.mark.long
def test_who_is_preempted_comes_back(slurm: Cluster, bench: Path) -> None:
    """A job of a higher-priority partition takes all processors of both nodes and preempts the job,
    which is requeued and finishes after one restart.
    """
    job = submit(slurm, bench, "run.dir=preempted", "run.seed=0")
    wait_for(*(bench / "preempted" / f"life_0_node_{node}" for node in (0, 1)))
    urgent = ["--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 0.1"]
    other = slurm.run("sbatch", *urgent, cwd=bench).strip()
    jobs = slurm.wait_for_jobs(other, job)
    assert [(jobs[each].code, jobs[each].restarts) for each in (other, job)] == [("0:0", 0), ("0:0", 1)]
    assert list((bench / "preempted").glob("heard_SIGTERM_0_*"))


def test_when_one_node_fails_the_other_ends(slurm: Cluster, bench: Path) -> None:
    """If the launcher of one node fails, the job fails without a restart, and the output contains
    the error.
    """
    job = submit(slurm, bench, "run.dir=failing", "run.seed=1")
    found = slurm.wait_for_jobs(job, timeout_s=60)[job]
    assert found.state == "FAILED" and found.restarts == 0
    output = (bench / "failing" / "logs" / "latest" / "output.txt").read_text()
    assert "error: node 1 fails" in output


def test_who_is_canceled_leaves_nobody_and_stays_away(slurm: Cluster, bench: Path) -> None:
    """A canceled job leaves no process and is not restarted.

    At least one launcher receives SIGTERM.
    """
    run, before = bench / "canceled", len(slurm.list_processes())
    job = submit(slurm, bench, "run.dir=canceled", "run.seed=2")
    wait_for(*(run / f"life_0_node_{node}" for node in (0, 1)))
    assert len(slurm.list_processes()) > before
    slurm.run("scancel", job, cwd=bench)
    slurm.wait_for_jobs(job, states=["CANCELLED"], timeout_s=60)
    deadline = time.monotonic() + 30
    while len(slurm.list_processes()) > before:
        assert time.monotonic() < deadline, "someone was left behind"
        time.sleep(0.2)
    assert slurm.read_jobs()[job].state == "CANCELLED" and not (run / "life_1_node_0").exists()
    assert list(run.glob("heard_SIGTERM_0_*")), "the first that ends lets srun kill the other"
