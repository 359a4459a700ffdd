"""openai-agents, smolagents and verifiers in their own environments, with a scripted policy and in
training runs with a real engine. Needs `bash launch/install_agents.sh .venv-agents`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.rollout_store import read_rollouts, step_path
from megatron_rl.types import Status
from tests.conftest import ROOT, SUPPORT
from tests.support import fork_server

ENVIRONMENTS = ROOT / ".venv-agents"
EXAMPLES = ROOT / "examples" / "agents"
AGENTS = ["openai_agents", "smolagents", "verifiers"]
PICTURE = re.compile(r"data:image/png;base64,[\w+/=]+")

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not ENVIRONMENTS.exists(), reason="needs bash launch/install_agents.sh .venv-agents"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Play every question with every agent and a policy that makes no mistakes."""
    out = tmp_path_factory.mktemp("agents") / "data"
    given = ("--out", out, "--environments", ENVIRONMENTS, "--split", "correct", "--passes", 1)
    played = fork_server.run_script(EXAMPLES / "record_transcripts.py", *given, timeout_s=800)
    assert played.returncode == 0, played.stdout[-6000:]
    assert re.findall(r"(\w+): 31 episodes, .* mean reward (\S+)", played.stdout) == [(agent, "1.000") for agent in AGENTS]
    return out


def comparable(messages: list[dict[str, Any]]) -> Any:
    """Return messages without the random ids of tool calls, and without pictures."""
    return json.loads(PICTURE.sub("picture", re.sub(r"call_[0-9a-f]+", "call", json.dumps(messages))))


@pytest.mark.parametrize("agent", AGENTS)
def test_the_requests_are_those_of_the_other_tests(agent: str, data: Path) -> None:
    """The requests stored in the repository are still those of the framework."""
    stored = json.loads((SUPPORT / "agents" / "recorded" / f"{agent}.json").read_text())["calls"]
    recorded = [json.loads(line) for line in (data / f"{agent}_requests.jsonl").read_text().splitlines()]
    assert [comparable(call["request"]) for call in recorded] == [comparable(call["request"]) for call in stored]


@pytest.mark.parametrize("agent", AGENTS)
def test_a_run_starts_one_process_for_each_episode(agent: str, data: Path, random_model: Path, tmp_path: Path) -> None:
    """Engine and trainer logprobs agree on every sampled token, the reward is the one that the
    agent prints, and no episode fails."""
    command = f"{ENVIRONMENTS}/{agent}/bin/python,{EXAMPLES}/play_{agent}.py,{data}/pictures"
    overrides = (
        "task=agent", f"task.options.command=[{command}]", "task.reward=reported", "task.options.processes=4",
        *(f"task.data.{split}=[{data}/questions.jsonl]" for split in ("train", "eval")), "task.max_turns=4", "task.max_new_tokens=12",
        "model.min_pixels=3136", "model.max_pixels=4000", "engine.kv_cache_mib=64", "engine.max_model_len=4096", "run.steps=1",
        "batch.prompts_per_step=2", "batch.group_size=2", "task.eval_samples=0", "run.eval_every=0", "rollouts.save=all",
        f"model.path={random_model}", f"run.dir={tmp_path / 'run'}",
    )  # fmt: skip
    result = fork_server.run_script(ROOT / "launch" / "train.py", *overrides, timeout_s=800)
    assert result.returncode == 0, result.stdout[-6000:]
    (step, *_) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert step["rollout_mismatch/logprob_abs_diff_max"] <= 1e-4
    rollouts = list(read_rollouts(step_path(tmp_path / "run" / "rollouts", 0), with_images=False))
    assert len(rollouts) == 4 and all(rollout.status in (Status.COMPLETED, Status.TRUNCATED) for rollout in rollouts)
    for rollout in rollouts:
        call = rollout.turns[-1].tool_call
        assert rollout.reward == (json.loads(call.text)["reward"] if rollout.status is Status.COMPLETED else 0.0)
