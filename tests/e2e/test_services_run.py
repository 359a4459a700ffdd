"""One command starts a judge (a vLLM server on the CPU), a sandbox server and a training run that
uses both. After kill -9 of the run, none of its processes is left.
"""

import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from megatron_rl.services.address import find_address, token_file
from tests.conftest import ROOT
from tests.support import fork_server
from tests.support.judge_service_overrides import JUDGE_ARGS, judge_run_overrides

pytestmark = pytest.mark.timeout(600)
SANDBOX = ("services.sandbox.kind=sandbox", "services.sandbox.args=[--size,1]", "task.sandbox.url=service:sandbox")


@dataclass(frozen=True)
class Killed:
    """A run that was killed during training."""

    home: Path
    said: str
    urls: dict[str, str]
    health: dict[str, object]
    started: list[str]
    """Command lines of all processes that the run had started."""
    left: list[str]


@pytest.fixture(scope="module")
def killed(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    home = tmp_path_factory.mktemp("services")
    judge = (f"services.judge={{kind: vllm, model: {random_model}, args: {JUDGE_ARGS}}}", "run.steps=500")
    words = (*judge_run_overrides(home, random_model), *SANDBOX, *judge)
    run = fork_server.Process(ROOT / "launch" / "train.py", *words, environment={"TORCHDYNAMO_DISABLE": "1"})
    try:
        deadline = time.monotonic() + 500
        metrics = home / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n")):
            assert time.monotonic() < deadline and run.poll() is None, run.output.read_text()[-6000:]
            time.sleep(0.1)
        urls = {name: find_address(home / "run", name, kind) for name, kind in (("judge", "vllm"), ("sandbox", "sandbox"))}
        token = token_file(home / "run", "sandbox").read_text()
        health = httpx.get(f"{urls['sandbox']}/health", headers={"Authorization": f"Bearer {token}"}).json()
        started = psutil.Process(run.pid).children(recursive=True)
        lines = [line for process in started if (line := command_of(process))]
    finally:
        run.kill()
    _, alive = psutil.wait_procs(started, timeout=30)
    return Killed(home, run.output.read_text(), urls, health, lines, [line for process in alive if (line := command_of(process))])


def command_of(process: psutil.Process) -> str:
    """Return the command line of a process, or an empty string if the process has ended, reaped or
    not.
    """
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def test_the_judge_of_the_run_gives_the_verdicts_of_its_training(killed: Killed) -> None:
    """The cached verdicts name the run's judge as their model, and the judge's log contains the
    requests.
    """
    with closing(sqlite3.connect(killed.home / "verdicts.sqlite")) as verdicts:
        found = verdicts.execute("SELECT DISTINCT model, prompt FROM verdicts").fetchall()
    assert [model for model, _ in found] == ["judge"] and found[0][1].startswith("process_calculation")
    log = (killed.home / "run" / "services" / "judge.log").read_text()
    assert "POST /v1/chat/completions" in log


def test_the_addresses_are_told_and_not_kept(killed: Killed) -> None:
    """The services' addresses are printed but not stored in config.yaml, which keeps the service
    names.
    """
    kept = yaml.safe_load((killed.home / "run" / "config.yaml").read_text())
    assert (kept["task"]["judge"]["urls"], kept["task"]["sandbox"]["url"]) == (["service:judge"], "service:sandbox")
    for name, url in killed.urls.items():
        assert url.startswith("http://127.0.0.1:") and f"service {name}: ready at {url} after " in killed.said
    assert killed.health["status"] == "ok" and killed.health["size"] == 1


def test_kill_9_ends_all_of_it(killed: Killed) -> None:
    """Killing the run ends its supervisors, its servers and their child processes.

    The address files that are left behind are not treated as addresses of running services.
    """
    assert sum("megatron_rl/supervisor.py" in line for line in killed.started) == 2 and len(killed.started) >= 5, killed.started
    assert not killed.left
    assert not find_address(killed.home / "run", "judge", "vllm") and not find_address(killed.home / "run", "sandbox", "sandbox")
