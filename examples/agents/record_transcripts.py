"""Records how the agents of this folder solve NumberLine with a scripted player as their policy.

    python examples/agents/record_transcripts.py --out runs/agents/data --environments .venv-agents

The agents run unmodified in their own virtual environments (launch/install_agents.sh), and the
endpoint is that of task=agent. The scripted player reads the state from the messages that the
policy would receive. It makes the mistakes of a demonstration split of task=number_line. OUT
contains:

    pictures/currentC_targetT.png    pictures of all states, which the agents send
    questions.jsonl                  one question for each of the 30 start states
    AGENT.jsonl, number_line.jsonl   transcripts for stage=sft (task.data.demonstrations)
    AGENT_requests.jsonl             requests of the first episode as they arrived, with responses
    words.txt                        all texts, for make_tiny_qwen2_5_vl.py --words

In a transcript, the tools are text of the system message, exactly as the chat template of
tools/data/qwen2_5_vl.jinja renders them in a rollout.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from megatron_rl.config import TaskSettings
from megatron_rl.config.rollout import DataSettings
from megatron_rl.config.task_options import AgentOptions
from megatron_rl.io.jsonl import write_lines_atomically
from megatron_rl.rollout.engine import ResponseSize
from megatron_rl.tasks.agent.task import AgentTask
from megatron_rl.tasks.gym_cards.number_line import ACTIONS, NUMBER_PAIRS, STATES, NumberLineState, draw_state, optimal_action
from megatron_rl.tasks.gym_cards.task import NumberLineTask, mistake_probability
from megatron_rl.types import Example, Message

HERE = Path(__file__).resolve().parent
AGENTS = ("openai_agents", "smolagents", "verifiers")
RECORDED = "current 3, target 5"
"""Question of which the requests are written."""
NUM_AT_ONCE = 4


@dataclass(frozen=True)
class Player:
    """Scripted policy for one agent."""

    agent: str
    split: str
    """Demonstration split of task=number_line: correct, or biased with wrong moves."""

    def choose_reply(self, messages: Sequence[Message], dice: random.Random) -> str:
        """Return the response to the last message."""
        state = read_state(messages)
        if self.agent == "smolagents" and state[0] == state[1]:
            return write_call("final_answer", answer="done")
        wrong = state[0] != state[1] and dice.random() < mistake_probability(self.split, state)
        best = optimal_action(state) if state[0] != state[1] else 0
        action = ACTIONS[1 - best if wrong else best]
        return action if self.agent == "verifiers" else write_call("move", action=action)


def write_call(name: str, **arguments: str) -> str:
    """Return a tool call as the policy samples it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def read_state(messages: Sequence[Message]) -> NumberLineState:
    """Return the state in the last message: its text, or its last picture."""
    content = messages[-1]["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    told = [re.search(r"Current: (\d)\. Target: (\d)\.", part["text"]) for part in parts if part["type"] == "text"]
    numbers = next((found for found in told if found), None)
    if numbers is not None:
        return int(numbers[1]), int(numbers[2])
    picture = [part["image"] for part in parts if part["type"] == "image"][-1].tobytes()
    return next(state for state in NUMBER_PAIRS if draw_state(state).tobytes() == picture)


async def play(task: AgentTask, example: Example, player: Player, seed: int) -> tuple[list[list[Message]], float]:
    """Play one episode, and return its sequences as transcripts, and the reported reward."""
    env, dice = task.env(example), random.Random(f"{seed} {example.id}")
    try:
        observed = await env.reset(seed)
        sequences = [[*observed]]
        while True:
            reply = player.choose_reply(sequences[-1], dice)
            sequences[-1].append({"role": "assistant", "content": [{"type": "text", "text": reply}]})
            env.note_response_size(ResponseSize(num_prompt_tokens=1, num_tokens=1, is_stopped=True))  # smolagents requires counts
            step = await env.step(reply)
            if step.done:
                assert step.tool_call is not None
                return sequences, json.loads(step.tool_call.text)["reward"]
            if step.is_new_prompt:
                sequences.append([without_loss(message) for message in step.messages])
            else:
                assert step.after_turn == sum(has_loss(each) for sequence in sequences for each in sequence) - 1, "a branch"
                sequences[-1] += step.messages
    finally:
        await env.close()


def without_loss(message: Message) -> Message:
    """Return a message of a new prompt, in which responses are not trained on."""
    return {**message, "loss": False} if message["role"] == "assistant" else message


def has_loss(message: Message) -> bool:
    """Return True for a response that is trained on."""
    return bool(message["role"] == "assistant" and message.get("loss", True))


def write_messages(messages: Sequence[Message], template: str) -> list[dict[str, Any]]:
    """Return messages of a transcript as JSON, with paths of images and the tools as text."""
    names = {draw_state(state).tobytes(): picture_name(state) for state in NUMBER_PAIRS}
    written: list[dict[str, Any]] = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts = [{**part, "image": names[part["image"].tobytes()]} if part["type"] == "image" else part for part in parts]
        written.append({"role": message["role"], "content": parts, **({"loss": False} if message.get("loss") is False else {})})
    tools = messages[0].get("tools")
    if tools:
        assert written[0]["role"] == "system", "the agents of this folder have a system message"
        (rendered, *_), _ = render_jinja_template([[written[0]]], tools=list(tools), chat_template=template)
        text = rendered.removeprefix("<|im_start|>system\n").removesuffix("<|im_end|>\n")
        written[0]["content"] = [{"type": "text", "text": text}]
    return written


def picture_name(state: NumberLineState) -> str:
    """Return the path of a picture in OUT."""
    return f"pictures/current{state[0]}_target{state[1]}.png"


def write_questions(out: Path) -> None:
    """Write the pictures of all states, and the questions."""
    (out / "pictures").mkdir(parents=True)
    for state in NUMBER_PAIRS:
        draw_state(state).save(out / picture_name(state))
    rows = [{"question": f"current {current}, target {target}", "answer": str(target)} for current, target in STATES]
    write_lines_atomically(out / "questions.jsonl", rows)


@contextlib.contextmanager
def start_service(python: Path, agent: str, pictures: Path) -> Iterator[str]:
    """Start the service of an agent, and yield its address."""
    command = [str(python), str(HERE / f"play_{agent}.py"), str(pictures), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        try:
            line = service.stdout.readline()
            if not line:
                raise SystemExit(f"error: {' '.join(command)}: did not start; bash launch/install_agents.sh creates its environment")
            yield line.split()[-1]
        finally:
            service.terminate()


@contextlib.contextmanager
def record_requests(base_url: str, records: list[dict[str, Any]]) -> Iterator[str]:
    """Start a proxy that records every request and its response, and yield its address."""

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {"Authorization": self.headers["Authorization"], "Content-Type": "application/json"}
            request = urllib.request.Request(base_url + self.path.removeprefix("/v1"), body, headers)
            with urllib.request.urlopen(request, timeout=60) as response:
                answer = response.read()
            records.append({"request": json.loads(body), "response": json.loads(answer)})
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments: object) -> None:
            """Print nothing for each request."""

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}/v1"
    finally:
        proxy.shutdown()
        proxy.server_close()


@dataclass
class Recording:
    """Results of all episodes of one agent."""

    transcripts: list[list[Message]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Requests of the first episode, which has no mistakes, and their responses."""


async def record(out: Path, url: str, player: Player, *, passes: int, seed: int) -> Recording:
    """Play the question RECORDED, then every question `passes` times, with an agent's service."""
    data = DataSettings(train=[str(out / "questions.jsonl")], eval=[str(out / "questions.jsonl")])
    task = AgentTask(TaskSettings(name="agent", reward="reported", data=data, options=AgentOptions(url=url)))
    recording, slots = Recording(), asyncio.Semaphore(NUM_AT_ONCE)

    async def play_one(example: Example, number: int) -> tuple[list[list[Message]], float]:
        async with slots:
            return await play(task, example, player, seed + number)

    await task.start()
    try:
        assert task.server is not None
        address, examples = task.server.base_url, task.examples("train")
        with record_requests(address, recording.requests) as proxy:
            task.server.base_url = proxy
            shown = next(each for each in examples if each.payload["question"] == RECORDED)
            first = await play(task, shown, replace(player, split="correct"), seed)
        task.server.base_url = address
        played = await asyncio.gather(*(play_one(example, number) for number in range(passes) for example in examples))
    finally:
        await task.close()
    for sequences, reward in [first, *played]:
        recording.transcripts += sequences
        recording.rewards.append(reward)
    return recording


def write_words(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the different texts of all messages, without the random ids of tool calls."""
    parts = [part for row in rows for message in row["messages"] for part in message["content"]]
    texts = dict.fromkeys(part["text"] for part in parts if part["type"] == "text")
    path.write_text(re.sub(r"call_[0-9a-f]+", "call_", "\n".join(texts)) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")
    parser.add_argument("--environments", type=Path, default=Path(".venv-agents"), help="folder of launch/install_agents.sh")
    parser.add_argument("--agents", nargs="+", default=[*AGENTS], choices=AGENTS, metavar="AGENT")
    parser.add_argument("--split", default="biased", choices=["correct", "biased"], help="mistakes of the player (default: biased)")
    parser.add_argument("--passes", type=int, default=2, metavar="N", help="episodes of each question (default: 2)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Record the chosen agents."""
    given = parse_arguments()
    out = given.out.resolve()
    if out.exists():
        sys.exit(f"error: --out={given.out}: exists; choose another folder")
    write_questions(out)
    template = (HERE.parents[1] / "tools" / "data" / "qwen2_5_vl.jinja").read_text(encoding="utf-8")
    native = NumberLineTask(TaskSettings(name="number_line")).demonstrations(given.split, num=len(STATES) * given.passes, seed=given.seed)
    rows = {"number_line": [{"messages": write_messages(each.messages, template)} for each in native]}
    for agent in given.agents:
        python = given.environments.resolve() / agent / "bin" / "python"
        with start_service(python, agent, out / "pictures") as url:
            found = asyncio.run(record(out, url, Player(agent, given.split), passes=given.passes, seed=given.seed))
        rows[agent] = [{"messages": write_messages(transcript, template)} for transcript in found.transcripts]
        write_lines_atomically(out / f"{agent}_requests.jsonl", found.requests)
        count = f"{len(found.rewards)} episodes, {len(found.transcripts)} transcripts"
        print(f"{agent}: {count}, mean reward {statistics.fmean(found.rewards):.3f}", flush=True)
    for name, transcripts in rows.items():
        write_lines_atomically(out / f"{name}.jsonl", transcripts)
    write_words([row for transcripts in rows.values() for row in transcripts], out / "words.txt")


if __name__ == "__main__":
    main()
