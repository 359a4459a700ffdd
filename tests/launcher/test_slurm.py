"""launch/submit.py: the script that it writes, the arguments that it refuses, and how it interprets
the output of sbatch (a stand-in here).
"""

import subprocess
from pathlib import Path

import pytest
import yaml

from megatron_rl.launcher.slurm import submit_main
from tests.conftest import ROOT
from tests.run.test_directory import leave

SIMPLE = ("experiment=numberline_grpo_cpu", "run.dir=run")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    return tmp_path


def answer(here: Path, script: str) -> None:
    (here / "bin" / "sbatch").write_text(f"#!/bin/sh\n{script}\n")
    (here / "bin" / "sbatch").chmod(0o755)


def test_the_script_says_all_that_was_asked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The generated job script has every requested #SBATCH option, and its last line starts
    train.sbatch with all arguments. job.yaml has the composed settings.
    """
    words = [*SIMPLE, "slurm.nodes=4", "slurm.gpus=8", "slurm.time=8:00:00", "slurm.requeue=true", "slurm.signal_s=600", "optim.lr=1e-3"]
    words += ["slurm.processes=2", "task.data.train=[a b.jsonl]", 'slurm.sbatch=["--account=mine",--exclusive]']
    assert submit_main([*words, "--dry-run", "--", "--constraint=a&b", "--nodes=2"]) == 0
    assert capsys.readouterr().out == "run/job.sbatch\n"
    script = (here / "run" / "job.sbatch").read_text().splitlines()
    assert script[:-1] == [
        "#!/usr/bin/env bash", "#SBATCH --job-name=run", f"#SBATCH --chdir={here}", f"#SBATCH --output={here}/run/logs/slurm-%j.out",
        "#SBATCH --nodes=4", "#SBATCH --ntasks-per-node=1", "#SBATCH --requeue", "#SBATCH --open-mode=append",
        "#SBATCH --gpus-per-node=8", "#SBATCH --time=8:00:00", "#SBATCH --signal=B:USR1@600", "#SBATCH --account=mine",
        "#SBATCH --exclusive", "#SBATCH '--constraint=a&b'", "#SBATCH --nodes=2",
    ]  # fmt: skip
    said = subprocess.run(
        ["/bin/bash", "-c", f"exec() {{ printf '%s\\n' \"$@\"; }}; {script[-1]}"], capture_output=True, text=True, check=True
    )
    started = ["bash", "launch/slurm/train.sbatch", "--requeue", f"--logs={here}/run/logs", "--nproc_per_node=2"]
    assert said.stdout.splitlines() == [*started, *words]
    stored = yaml.safe_load((here / "run" / "job.yaml").read_text())
    assert (stored["optim"]["lr"], stored["slurm"]["nodes"], stored["task"]["data"]["train"]) == (1e-3, 4, ["a b.jsonl"])


def test_it_is_submitted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer(here, f'echo "$@" > {here}/told; echo "1234;cluster"')
    assert submit_main([*SIMPLE]) == 0
    assert capsys.readouterr().out == "job 1234: run/job.sbatch; its output: run/logs\n"
    assert (here / "told").read_text() == "--parsable run/job.sbatch\n"
    assert "#SBATCH --no-requeue" in (here / "run" / "job.sbatch").read_text()


def test_what_cannot_be_submitted_is_a_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: str) -> str:
        assert submit_main(words) == 1
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1
        return said.err

    assert refused(*SIMPLE, "slurm.nodes=0") == "error: slurm.nodes=0: must be at least 1\n"
    assert refused(*SIMPLE, "slurm.node=4") == "error: slurm.node=4: no such key; did you mean slurm.nodes?\n"
    assert refused(*SIMPLE, "slurm.sbatch=[mine]").endswith("mine is not an option of sbatch; write --KEY=VALUE\n")
    assert refused("run.dir=run").startswith("error: model.path=")
    (here / "launch").rename(here / "moved")
    assert refused(*SIMPLE) == f"error: {here}: does not contain launch/slurm/train.sbatch; submit from the folder that contains launch/\n"
    (here / "moved").rename(here / "launch")
    assert not (here / "run").exists(), "nothing is written for what does not compose"
    leave(here / "run", "steps checkpoint")
    before = sorted(path.name for path in (here / "run").iterdir())
    assert refused(*SIMPLE).startswith("error: run.dir=run: contains a run with other settings: ")
    assert sorted(path.name for path in (here / "run").iterdir()) == before
    there = [*SIMPLE[:1], "run.dir=there"]
    assert refused(*there) == "error: sbatch: command not found; submit there/job.sbatch from a login node of the cluster\n"
    answer(here, 'echo "sbatch: error: invalid partition specified: x" >&2; exit 1')
    assert refused(*there) == "error: sbatch: invalid partition specified: x (there/job.sbatch)\n"
