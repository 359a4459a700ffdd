"""Agents with a command in the sandbox: what they reach, and what they cannot reach. The
same agent without the sandbox reaches everything, so the attacks work.
"""

import json
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from megatron_rl.config import ModelSettings, RunSettings, Settings, TaskSettings
from megatron_rl.config.rollout import DataSettings
from megatron_rl.config.task_options import AgentOptions
from megatron_rl.preflight.settings import check_sandbox_paths
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.tasks.agent import task as agent_task
from megatron_rl.tasks.agent.agent_sandbox import open_sandbox
from megatron_rl.types import Rollout, Status
from megatron_rl_sandbox.layers import detect_layers
from tests.conftest import SUPPORT
from tests.support.agent_episodes import SETTINGS, play

AGENTS = SUPPORT / "agents"
VARIABLES = ["HOME", "LANG", "MEGATRON_RL_SEED", "OPENAI_API_KEY", "OPENAI_BASE_URL", "PATH", "TMPDIR"]

pytestmark = pytest.mark.skipif(detect_layers()["mount_ns"] is not None, reason="this host offers no isolation")


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=3136))


@dataclass
class Targets:
    """Files, ports and processes that the agent attacks."""

    files: list[str]
    folders: list[str]
    ports: list[int]

    def to_json(self, *, kills: bool) -> str:
        parents = [os.getpid(), os.getppid()]
        return json.dumps({"files": self.files, "folders": self.folders, "ports": self.ports, "parents": parents, "kills": kills})


@pytest.fixture
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Targets]:
    """A run directory, an environment variable with a key, and a server of the host."""
    monkeypatch.setenv("MY_SECRET", "hunter2")
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("{}\n")
    for folder in (run, *run.parents):
        if folder.is_relative_to(tmp_path):
            folder.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Targets(
            files=[str(run / "metrics.jsonl"), str(tmp_path / "q.jsonl"), "/etc/passwd", "/proc/1/status"],
            folders=[str(run), "/usr", "/var/tmp", str(AGENTS)], ports=[server.getsockname()[1]],
        )  # fmt: skip


def attack(folder: Path, renderer: Renderer, targets: Targets, *, kills: bool = False, **given: object) -> tuple[Rollout, dict]:
    command = [sys.executable, str(AGENTS / "attacking_agent.py"), targets.to_json(kills=kills)]
    rollout, _ = play(folder, renderer, "", command=command, settings=replace(SETTINGS, env_timeout_s=60.0), **given)
    assert rollout.status is Status.COMPLETED, rollout.reason
    return rollout, json.loads(rollout.turns[-1].tool_call.text)


def test_the_attacks_succeed_without_the_sandbox(renderer: Renderer, tmp_path: Path, targets: Targets) -> None:
    _, found = attack(tmp_path, renderer, replace(targets, folders=targets.folders[:1]))
    assert found["files"] == targets.files and found["folders"] == targets.folders[:1] and found["ports"] == targets.ports
    assert found["seen"] and found["secrets"] > 1 and found["unix"] and found["input"] and "MY_SECRET" in found["variables"]


@pytest.mark.parametrize("layers", ["root", "user_ns"])
def test_an_agent_in_the_sandbox_reaches_only_its_endpoint(
    layers: str, renderer: Renderer, tmp_path: Path, targets: Targets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads its folder and the named path; files, variables and processes of the run, other
    ports, raw and Unix sockets and privileges are out of reach. It kills nothing but itself.
    """
    if layers == "user_ns":
        monkeypatch.setattr(agent_task, "open_sandbox", open_in_user_namespace)
    before = len(psutil.Process().children(recursive=True))
    rollout, found = attack(tmp_path, renderer, targets, kills=True, sandbox=True, sandbox_paths=[str(AGENTS)])
    nothing = {"files": [], "folders": [], "ports": [], "seen": [], "traced": [], "secrets": 0, "unix": False, "raw": False, "root": False}
    assert {name: found[name] for name in nothing} == nothing
    assert (found["input"], found["images"], found["variables"]) == (False, [True], VARIABLES)
    assert found["survived"] and found["texts"] == ["r0", "r1"] and len(rollout.turns) == 2
    assert len(psutil.Process().children(recursive=True)) == before


def open_in_user_namespace(paths: list[str]) -> object:
    """Return the sandbox of a run without root rights."""
    sandbox = open_sandbox(paths)
    return replace(sandbox, layers=replace(sandbox.layers, drop_uid=False, user_ns=True))


@pytest.mark.parametrize("mode", ["linear", "streamed", "parallel"])
def test_clients_work_in_the_sandbox(mode: str, renderer: Renderer, tmp_path: Path) -> None:
    """The openai client with images, streams and requests at the same time, and its exit."""
    plain, _ = play(tmp_path, renderer, mode)
    isolated, _ = play(tmp_path, renderer, mode, sandbox=True, sandbox_paths=[str(AGENTS)])
    assert isolated.status is Status.COMPLETED, isolated.reason
    assert [turn.text for turn in isolated.turns] == [turn.text for turn in plain.turns]
    texts = [turn.tool_call.text for turn in (isolated.turns[-1], plain.turns[-1])]
    if mode == "parallel":  # the three requests arrive in any order, and the fourth repeats the first
        for first, second, third, fourth in map(json.loads, texts):
            assert {first, second, third} == {"r0", "r1", "r2"} and fourth == first
    else:
        assert texts[0] == texts[1]
    assert [image.key for image in isolated.sequences[0].images] == [image.key for image in plain.sequences[0].images]


def test_a_failing_agent_is_described(renderer: Renderer, tmp_path: Path) -> None:
    rollout, _ = play(tmp_path, renderer, "crash", sandbox=True, sandbox_paths=[str(AGENTS)])
    assert "exited with code 1 (cannot parse 'r0')" in rollout.reason and "sandbox.command" not in rollout.reason


def make_task(folder: Path, *, reward: str = "", command: list[str] | None = None, **given: object) -> agent_task.AgentTask:
    (folder / "q.jsonl").write_text('{"question": "?", "answer": "r1"}\n')
    data = DataSettings(train=[str(folder / "q.jsonl")], eval=[str(folder / "q.jsonl")])
    options = AgentOptions(command=command or [sys.executable, str(AGENTS / "vowel_agent.py")], sandbox=True, **given)
    return agent_task.AgentTask(TaskSettings(name="agent", data=data, options=options, reward=reward))


def test_settings_that_would_show_too_much_or_too_little(tmp_path: Path) -> None:
    for given, message in (
        ({}, r"^task.options.command=.*vowel_agent.py: is not visible in the sandbox; add it to task.options.sandbox_paths=\["),
        ({"sandbox_paths": [str(AGENTS), str(tmp_path)]}, r"^task.options.sandbox_paths=.*q.jsonl is below .*, which the agent can read"),
        ({"sandbox_paths": [str(AGENTS)], "reward": "posted"}, "^task.reward=posted: needs a key that the command does not receive"),
        ({"sandbox_paths": ["agents"]}, "^task.options.sandbox_paths=agents: is not an absolute path"),
        ({"sandbox_paths": ["/no/agents"]}, "^task.options.sandbox_paths=/no/agents: does not exist on this machine"),
        ({"host": "0.0.0.0"}, "^task.options.host=0.0.0.0: with task.options.sandbox=true, the run listens on 127.0.0.1"),
    ):
        with pytest.raises(ValueError, match=message):
            make_task(tmp_path, **given)
    with pytest.raises(ValueError, match="^task.options.sandbox_paths=.*: has an effect only with task.options.sandbox=true"):
        AgentOptions(command=["x"], sandbox_paths=["/tmp"])
    with pytest.raises(ValueError, match="^task.options.sandbox=True: isolates a command"):
        AgentOptions(url="http://node2:1/x", sandbox=True)
    options = AgentOptions(command=["x"], sandbox=True, sandbox_paths=[str(tmp_path)])
    settings = Settings(task=TaskSettings(name="agent", options=options), run=RunSettings(dir=str(tmp_path / "runs" / "a")))
    with pytest.raises(ValueError, match=r"^run.dir=.*: is below .*, which the agent can read; choose another folder"):
        check_sandbox_paths(settings)
