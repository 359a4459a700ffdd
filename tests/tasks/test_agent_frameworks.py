"""Tests recorded requests of openai-agents 0.24.0, smolagents 1.26.0 and verifiers 0.4.0.

examples/agents/record_transcripts.py recorded the files in tests/support/agents/recorded on
2026-11-28: the requests of one game of NumberLine, the responses, and the transcripts for SFT. The
pictures are replaced by the names of their states. tests/e2e/test_agent_frameworks_run.py runs the
frameworks themselves.
"""

import base64
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config import ModelSettings, TaskSettings
from megatron_rl.config.rollout import DataSettings
from megatron_rl.config.task_options import AgentOptions
from megatron_rl.data.transcripts import load_transcripts
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.tasks.agent.task import AgentTask
from megatron_rl.tasks.gym_cards.number_line import NUMBER_PAIRS, draw_state
from megatron_rl.types import Rollout, Status
from tests.conftest import SUPPORT
from tests.support import agent_episodes
from tests.support.agent_episodes import Counting, play_task

RECORDED = SUPPORT / "agents" / "recorded"
REPLAYING = SUPPORT / "agents" / "replaying_agent.py"
SETTINGS = replace(agent_episodes.SETTINGS, max_new_tokens=80)
REASONS = {
    "openai_agents": "1 continued",
    "smolagents": "2 new prompts, replaced tool_choice",
    "verifiers": "1 continued",
}
NUM_SEQUENCES = {"openai_agents": 1, "smolagents": 3, "verifiers": 1}


def picture_url(name: str) -> str:
    """Return the picture of a state, e.g. current3_target5, as a data URL."""
    current, target = map(int, re.findall(r"\d", name))
    encoded = io.BytesIO()
    draw_state((current, target)).save(encoded, "PNG")
    return f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=3136))


def write_reply(message: dict[str, Any]) -> str:
    """Return a recorded response as the policy sampled it."""
    calls = [
        {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
        for call in message.get("tool_calls") or ()
    ]
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls) or message["content"]


def replay(agent: str, renderer: Renderer, folder: Path) -> tuple[Rollout, Counting, list[dict[str, Any]]]:
    """Send the recorded requests; return the rollout, its engine and the recorded responses."""
    calls = json.loads((RECORDED / f"{agent}.json").read_text())["calls"]
    lines = [re.sub(r"data:image/png;base64,(\w+)", lambda name: picture_url(name[1]), json.dumps(call["request"])) for call in calls]
    (folder / "requests.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "q.jsonl").write_text('{"question": "current 3, target 5", "answer": "5"}\n')
    data = DataSettings(train=[str(folder / "q.jsonl")], eval=[str(folder / "q.jsonl")])
    command = [sys.executable, "-S", str(REPLAYING), str(folder / "requests.jsonl")]
    task = AgentTask(TaskSettings(name="agent", data=data, options=AgentOptions(command=command)))
    messages = [call["response"]["choices"][0]["message"] for call in calls]
    engine = Counting(renderer, [write_reply(message) for message in messages])
    return play_task(task, engine, settings=SETTINGS), engine, messages


def without_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**message, "tool_calls": [call["function"] for call in message.get("tool_calls") or ()]} for message in messages]


@pytest.mark.parametrize("agent", REASONS)
def test_recorded_requests_are_the_sequences_of_the_transcripts(agent: str, renderer: Renderer, tmp_path: Path) -> None:
    """Every request is accepted and continues the former one, or is a new prompt if the framework
    rewrites its history; the agent receives the recorded responses; and stage=sft trains on the
    transcripts exactly as the rollout's tokens and loss."""
    rollout, engine, messages = replay(agent, renderer, tmp_path)
    assert rollout.status is Status.COMPLETED, rollout.reason
    counted, _, changed = rollout.reason.partition(", response 0 was returned changed: ")
    assert counted == REASONS[agent] and bool(changed) == (agent == "smolagents"), rollout.reason
    received = json.loads(rollout.turns[-1].tool_call.text)
    assert without_ids(received) == without_ids(messages)
    assert engine.stops == [("Observation:", "Calling tools:") if agent == "smolagents" else ()] * len(messages)
    check_transcripts(json.loads((RECORDED / f"{agent}.json").read_text())["transcripts"], rollout, renderer, tmp_path)
    assert len(rollout.sequences) == NUM_SEQUENCES[agent]


@pytest.mark.parametrize("agent", ["openai_agents", "verifiers"])
def test_the_last_request_and_its_response_are_a_transcript(agent: str, renderer: Renderer, tmp_path: Path) -> None:
    """Messages, tools and tool calls as they were sent, in one row, are trained on exactly as the
    rollout's tokens and loss."""
    rollout, *_ = replay(agent, renderer, tmp_path)
    line = (tmp_path / "requests.jsonl").read_text().splitlines()[-1]
    response = json.loads((RECORDED / f"{agent}.json").read_text())["calls"][-1]["response"]["choices"][0]["message"]
    request = json.loads(line)
    row = {"messages": [*request["messages"], response], "tools": request.get("tools", [])}
    assert ("tool_calls" in response) == bool(row["tools"]) == (agent == "openai_agents")
    check_transcripts([row], rollout, renderer, tmp_path)


def check_transcripts(rows: list[dict[str, Any]], rollout: Rollout, renderer: Renderer, tmp_path: Path) -> None:
    """Check that the sequences of a rollout equal the transcripts in these rows."""
    (tmp_path / "pictures").mkdir()
    for current, target in NUMBER_PAIRS:
        draw_state((current, target)).save(tmp_path / "pictures" / f"current{current}_target{target}.png")
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    expected = [renderer.transcript(each) for each in load_transcripts([str(tmp_path / "t.jsonl")], images_root="")]
    assert len(expected) == len(rollout.sequences)
    for sequence, transcript in zip(rollout.sequences, expected, strict=True):
        assert (sequence.token_ids, sequence.loss_mask) == (transcript.token_ids, transcript.loss_mask)
        assert [image.key for image in sequence.images] == [image.key for image in transcript.images]
