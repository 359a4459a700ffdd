"""One command starts a judge, a sandbox and a training that asks both: vLLM's own server on a CPU; and kill -9 ends all of it.

The judge is a nano with random weights that a schema makes give verdicts, as in test_judge_server.py.
"""

import json
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from PIL import Image

from megatron_rl.services.address import find
from tests.conftest import ROOT
from tests.support import forked

pytestmark = pytest.mark.timeout(600)
SERVICES = (
    "services.sandbox.kind=sandbox", "services.sandbox.args=[--size,1]", "task.sandbox.url=service:sandbox", "services.judge.kind=vllm",
    "services.judge.args=[--dtype,float32,--enforce-eager,--max-model-len,4096,--kv-cache-memory-bytes,67108864,"
    "--structured-outputs-config.backend,xgrammar,--structured-outputs-config.disable_any_whitespace,\"true\"]",
    "judge=vision", "task.judge.urls=[service:judge]",
)  # fmt: skip
TINY = (
    "model.min_pixels=3136", "model.max_pixels=4000", "engine.kv_cache_mib=16", "engine.max_model_len=4096", "task.max_turns=1",
    "task.max_tokens_per_turn=4", "task.eval_samples=1", "batch.prompts_per_step=2", "batch.group_size=2", "run.steps=500",
)  # fmt: skip


@dataclass(frozen=True)
class Killed:
    """A run that was killed in the middle of training."""

    home: Path
    said: str
    urls: dict[str, str]
    health: dict[str, object]
    started: list[str]
    """Command lines of all that the run had started."""
    left: list[str]


@pytest.fixture(scope="module")
def killed(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    home = tmp_path_factory.mktemp("services")
    Image.new("RGB", (84, 56), "red").save(home / "red.png")
    row = {"question": "What is 2 + 2?", "answer": "4", "data_source": "mine", "images": ["red.png"]}
    (home / "mine.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    data = ("task=visual_python", "task.protocol=codev", "task.reward=codev", f"task.data.train=[{home}/mine.jsonl]")
    words = (*data, f"task.data.eval=[{home}/mine.jsonl]", f"task.judge.cache={home}/verdicts.sqlite", *SERVICES, *TINY)
    begin = (f"model.path={random_model}", f"run.dir={home}/run", f"services.judge.model={random_model}")
    run = forked.Process(ROOT / "launch" / "train.py", *begin, *words, environment={"TORCHDYNAMO_DISABLE": "1"})
    try:
        deadline = time.monotonic() + 500
        metrics = home / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n")):
            assert time.monotonic() < deadline and run.poll() is None, run.output.read_text()[-6000:]
            time.sleep(0.1)
        urls = {name: find(home / "run", name, kind) for name, kind in (("judge", "vllm"), ("sandbox", "sandbox"))}
        health = httpx.get(f"{urls['sandbox']}/health").json()
        started = psutil.Process(run.pid).children(recursive=True)
        lines = [line for process in started if (line := command_of(process))]
    finally:
        run.kill()
    _, alive = psutil.wait_procs(started, timeout=30)
    return Killed(home, run.output.read_text(), urls, health, lines, [line for process in alive if (line := command_of(process))])


def command_of(process: psutil.Process) -> str:
    """Empty of one that has ended, whether anybody has heard of it or not."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def test_the_judge_of_the_run_gives_the_verdicts_of_its_training(killed: Killed) -> None:
    with closing(sqlite3.connect(killed.home / "verdicts.sqlite")) as verdicts:
        found = verdicts.execute("SELECT DISTINCT model, prompt FROM verdicts").fetchall()
    assert [model for model, _ in found] == ["judge"] and found[0][1].startswith("process_calculation")
    log = (killed.home / "run" / "services" / "judge.log").read_text()
    assert "POST /v1/chat/completions" in log


def test_the_addresses_are_told_and_not_kept(killed: Killed) -> None:
    kept = yaml.safe_load((killed.home / "run" / "config.yaml").read_text())
    assert (kept["task"]["judge"]["urls"], kept["task"]["sandbox"]["url"]) == (["service:judge"], "service:sandbox")
    for name, url in killed.urls.items():
        assert url.startswith("http://127.0.0.1:") and f"service {name}: {url}, after " in killed.said
    assert killed.health["status"] == "ok" and killed.health["size"] == 1


def test_kill_9_ends_all_of_it(killed: Killed) -> None:
    """Keepers, servers, and what those had started; the addresses that stay behind are of nobody."""
    assert sum("services/keeper.py" in line for line in killed.started) == 2 and len(killed.started) >= 5, killed.started
    assert not killed.left
    assert not find(killed.home / "run", "judge", "vllm") and not find(killed.home / "run", "sandbox", "sandbox")
