"""The scripts in launch/slurm start the expected commands. Stand-ins for Slurm's commands and for
Python record their arguments; tests/e2e/test_slurm*.py runs the same scripts with a real Slurm.
"""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT

RUN = ("experiment=numberline_grpo_cpu", "run.dir=a folder", "task.data.train=[a,b c]")
Start = Callable[..., list[str]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Return start(script, *words, **environment), which returns the words of the command that the
    script finally starts.
    """
    programs, told = tmp_path / "bin", tmp_path / "told"
    programs.mkdir()
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    scripts = {
        "python": f'printf "%s\\n" "$@" > {told}',
        "srun": f'printf "%s\\n" "$@" > {told}',
        "scontrol": 'test "$*" = "show hostnames n[3-4]" && printf "n3\\nn4\\n"',
    }
    for name, script in scripts.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)

    def starts(script: str, *words: str, code: int = 0, **environment: str) -> list[str]:
        kept = {"PATH": f"{programs}:{os.environ['PATH']}", **environment}
        command = ["bash", f"launch/slurm/{script}", *words]
        result = subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == code, result.stderr
        return told.read_text().splitlines() if code == 0 else result.stderr.splitlines()

    return starts


JOB = {"SLURM_JOB_NODELIST": "n[3-4]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "1234567"}


def test_each_node_has_a_launcher_and_all_meet_at_the_first(start: Start, tmp_path: Path) -> None:
    """Each node runs one task, and a task that fails ends the others. Each task passes its own node
    rank, and options with a dash go to the launcher.
    """
    called = start("nodes.sh", "--nproc_per_node=2", "--max-restarts=0", *RUN, **JOB, SLURM_GPUS_ON_NODE="8")
    own = called[: called.index("bash")]
    assert {"--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--cpu-bind=none"} == {*own}
    (tmp_path / "told").unlink()
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_NODEID": "1"}
    subprocess.run(called[len(own) :], cwd=tmp_path, env=environment, timeout=60, check=True)
    launched = (tmp_path / "told").read_text().splitlines()
    assert launched[:2] == ["launch/launch.py", "--node_rank=1"] and launched[-4:] == ["launch/train.py", *RUN]
    assert {"--nnodes=2", "--master_addr=n3"} < {*launched[2:-4]}
    assert launched.index("--nproc_per_node=8") < launched.index("--nproc_per_node=2") < launched.index("launch/train.py"), (
        "the last counts"
    )
    assert "--max-restarts=0" in launched[2:-4]


@pytest.mark.parametrize(("job", "other"), [("1234567", "1234568"), ("1", "9999"), ("10000", "4294967294")])
def test_jobs_on_one_node_meet_at_ports_of_their_own(start: Start, job: str, other: str) -> None:
    ports = []
    for number in (job, other):
        called = start("nodes.sh", *RUN, **{**JOB, "SLURM_JOB_ID": number})
        assert "--nproc_per_node=1" in called, "without GPUs"
        ports += [int(word.removeprefix("--master_port=")) for word in called if word.startswith("--master_port=")]
    assert len({*ports}) == 2 and all(1024 < port < 32768 for port in ports), "below those that Linux gives away by itself"


@pytest.mark.parametrize("own", [(), ("--requeue",), ("--logs=runs/a b/logs",), ("--requeue", "--logs=x"), ("--logs=x", "--requeue")])
@pytest.mark.parametrize("launcher", [(), ("--nproc_per_node=2",)])
def test_a_job_of_training(start: Start, own: tuple[str, ...], launcher: tuple[str, ...]) -> None:
    """Options of launch/attempt.py are passed to it, and all other words to nodes.sh."""
    called = start("train.sbatch", *own, *launcher, *RUN)
    assert called == ["launch/attempt.py", *own, "--", "bash", "launch/slurm/nodes.sh", *launcher, *RUN]


@pytest.mark.parametrize("own", [(), ("--requeue",)])
def test_a_job_of_services(start: Start, own: tuple[str, ...]) -> None:
    assert start("judge.sbatch", *own, *RUN) == ["launch/attempt.py", *own, "--", "python", "launch/serve.py", *RUN]


def test_a_task_of_a_sweep(start: Start) -> None:
    called = start("sweep.sbatch", "sweep.yaml", "--requeue", SLURM_ARRAY_TASK_ID="7")
    assert called == ["launch/sweep.py", "sweep.yaml", "--requeue", "--task", "7"]
    assert start("sweep.sbatch", "sweep.yaml", code=1) == [
        "error: --array=: is missing; python launch/sweep.py SWEEP.YAML --print shows its value"
    ]


@pytest.mark.parametrize("script", ["train.sbatch", "judge.sbatch", "sweep.sbatch"])
def test_a_job_that_begins_elsewhere_is_refused(start: Start, script: str, tmp_path: Path) -> None:
    """Slurm runs a copy of the script in the folder that the job was submitted from, so a folder
    without launch/ is refused. Also checks the #SBATCH lines, with 300, 60 and 300 s of notice.
    """
    (tmp_path / "launch").unlink()
    (tmp_path / "launch" / "slurm").mkdir(parents=True)
    (tmp_path / "launch" / "slurm" / script).write_bytes((ROOT / "launch" / "slurm" / script).read_bytes())
    (line,) = start(script, *RUN, code=1, SLURM_ARRAY_TASK_ID="0")
    assert line.startswith(f"error: --chdir={tmp_path}: does not contain launch/")
    text = (ROOT / "launch" / "slurm" / script).read_text()
    seconds = {"train.sbatch": 300, "judge.sbatch": 60, "sweep.sbatch": 300}[script]
    assert {f"#SBATCH --signal=B:USR1@{seconds}", "#SBATCH --open-mode=append", "#SBATCH --ntasks-per-node=1"} <= {*text.splitlines()}
