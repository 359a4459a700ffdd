"""The doctor within a multi-node job: two nodes with different problems, and the time left in the
job.
"""

import json
import re
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.config import ModelSettings, RunSettings, Settings, TaskSettings
from megatron_rl.preflight.check_report import CheckReport
from megatron_rl.preflight.doctor_job import check_time_left
from tests.conftest import ROOT, SUPPORT
from tests.support import fork_server
from tests.support.loopback_nodes import start_ranks

HOST = socket.gethostname()


def report_of(*words: object, folders: list[Path]) -> CheckReport:
    nodes = start_ranks(SUPPORT / "doctor_job.py", *words, folders=folders)
    try:
        said, _ = nodes[0].communicate(timeout=120)
        assert nodes[0].returncode == 0, said
    finally:
        for node in nodes:
            node.kill()
    return CheckReport(**json.loads(said.splitlines()[-1]))


def test_two_nodes_are_one_report(random_model: Path, tmp_path: Path) -> None:
    """Findings of both nodes are listed; a problem of all nodes is reported once, a problem of one
    node with its name. run.dir=run resolves to two different folders, and the clocks differ by the
    planted offset of about 5 s.
    """
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    report = report_of(random_model, "run", folders=folders)
    rows = {what: found for what, found in report.findings}
    assert rows[f"node 0 ({HOST}): GPUs"] == "0" and rows[f"node 1 ({HOST}): GPUs"] == "1"
    assert report.errors[:2] == ["a=1: all have it", f"b=2: one has it (node 1 ({HOST}))"]
    assert re.match(rf"run.dir=run: (could not be written|node 1 \({HOST}\) does not see a file)", report.errors[2]), report.errors
    (clock,) = report.warnings
    ahead = re.fullmatch(rf"clock: the clock of node 1 \({HOST}\) is (.*) s ahead of that of rank 0; set it \(chronyc makestep\)", clock)
    assert 4.5 < float(ahead[1]) < 5.5
    assert re.fullmatch(r"2 ranks, 64 MiB: \d+\.\d GB/s", rows["all-reduce"])
    assert not any((folder / "run").exists() for folder in folders), "nothing stays"


def test_two_ranks_of_a_run_that_can_start(random_model: Path, tmp_path: Path) -> None:
    """Two ranks run the complete doctor as a launcher starts it. The first rank of the node checks
    plan, model and task; both ranks take part in the all-reduce and the clock check.
    """
    words = ("experiment=numberline_grpo_cpu", f"model.path={random_model}", f"run.dir={tmp_path}/run", "plan.host_gb=100")
    done = fork_server.run_world(2, ROOT / "launch" / "doctor.py", *words, timeout_s=120)
    assert done.returncode == 0 and done.stdout.count("a run can start\n") == 1, done.stdout
    assert "2 processes fit" in done.stdout and "2 ranks, 64 MiB" in done.stdout and "Traceback" not in done.stdout


@pytest.mark.parametrize(("hours", "warned"), [(1.0, False), (0.1, True)])
def test_the_time_that_is_left_is_held_against_the_steps(
    hours: float, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 of 100 steps are done and the last ones took 10 s each, so 700 s are needed. The doctor
    warns if 0.1 hours are left and does not warn if one hour is left.
    """
    steps = [{"step": step, "time/update": 6.0, "time/engine": 94.0 if step < 20 else 4.0, "time/start": 500.0} for step in range(30)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    settings = Settings(model=ModelSettings(path="m"), run=RunSettings(dir=str(tmp_path), steps=100), task=TaskSettings(name="number_line"))
    report = CheckReport()
    check_time_left(settings, report)
    assert not report.findings, "outside of a job nobody knows"
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(round(time.time() + 3600 * hours)))
    check_time_left(settings, report)
    assert report.findings == [("time", f"70 steps of 10.0 s, {hours:.1f} hours left")]
    told = "run.steps=100: 70 steps of 10.0 s are left, 36 fit into the job; the same command resumes the run in the next job"
    assert report.warnings == [told] * warned
    (tmp_path / "config.yaml").write_text("run: {steps: 100, epochs: 2.0}\n")
    by_epochs, again = replace(settings, run=RunSettings(dir=str(tmp_path), epochs=2)), CheckReport()
    check_time_left(by_epochs, again)
    assert again.findings == report.findings, "the steps that the epochs resulted in, not the default of run.steps"
