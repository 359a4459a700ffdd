"""Train an agent that calls the tools of an MCP server.

    python examples/mcp_tools.py demonstrate
    python examples/mcp_tools.py stage=sft
    python examples/mcp_tools.py

The server is examples/mcp_server.py, with one tool, which shows a numbered dot. The questions ask
for the color of a dot and have no pictures, so the policy must call the tool. The first command
plays episodes with written responses and keeps them as transcripts. The second trains on them, so
that the policy learns the format of a call. The third continues with GRPO. Any other MCP server is
used in the same way, see `SERVER` and docs/agents.md.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.cli import cli
from megatron_rl.config import DataSettings, McpServerSettings, TaskSettings, ToolSettings
from megatron_rl.tasks.visual_python.function_tools import FunctionsProtocol
from megatron_rl.tasks.visual_python.task import VisualPythonTask
from megatron_rl.types import Example, Message

FOLDER = Path("runs/examples/mcp_tools")
NUM_DOTS = 16
SERVER = [sys.executable, str(Path(__file__).resolve().with_name("mcp_server.py"))]
SETTINGS = [
    "task=visual_python", "task.tool_format=functions", f"task.tools.mcp=[{{name:dots,command:[{','.join(SERVER)}]}}]",
    f"task.data.train=[{FOLDER}/questions.jsonl]", f"task.data.eval=[{FOLDER}/questions.jsonl]",
    "task.max_turns=2", "task.max_new_tokens=60", "model.min_pixels=3136", "model.max_pixels=3136",
]  # fmt: skip
SFT = [
    "model.path=runs/quickstart/nano", f"run.dir={FOLDER}/sft", f"task.data.demonstrations=[{FOLDER}/transcripts.jsonl]",
    "sft.steps=[120]", "sft.batch_size=16", "optim.lr=2e-3",
]  # fmt: skip
RL = [
    f"model.path={FOLDER}/sft/final", f"run.dir={FOLDER}/grpo", "run.steps=10", "optim.lr=2e-4",
    "batch.prompts_per_step=8", "batch.group_size=8",
]  # fmt: skip


def color_of(number: int) -> str:
    """Return the color of a dot, as in mcp_server.py."""
    return ("red", "green", "blue", "black")[(number * 7 + number // 3) % 4]


def write_questions() -> list[dict[str, str]]:
    """Write one question for each dot and return the questions."""
    rows = [{"id": str(dot), "question": f"What color is dot {dot}?", "answer": color_of(dot)} for dot in range(NUM_DOTS)]
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


async def demonstrate() -> None:
    """Play one episode for each question with written responses, and write the transcripts."""
    rows = write_questions()
    server = McpServerSettings(name="dots", command=SERVER)
    data = DataSettings(train=[str(FOLDER / "questions.jsonl")], eval=[str(FOLDER / "questions.jsonl")])
    task = VisualPythonTask(TaskSettings(name="visual_python", tool_format="functions", data=data, tools=ToolSettings(mcp=[server])))
    with (FOLDER / "transcripts.jsonl").open("w") as file:
        for row, example in zip(rows, task.examples("train"), strict=True):
            protocol = FunctionsProtocol()
            call, answer = protocol.write_call("show_dot", {"number": int(row["id"])}), protocol.write_answer(row["answer"])
            messages = await play_episode(task, example, call)
            file.write(
                write_transcript([*messages, {"role": "assistant", "content": [{"type": "text", "text": answer}]}], row["id"]) + "\n"
            )


async def play_episode(task: VisualPythonTask, example: Example, reply: str) -> list[Message]:
    """Return the messages of an episode after one response."""
    env = task.env(example)
    try:
        prompt = await env.reset(0)
        step = await env.step(reply)
        return [*prompt, {"role": "assistant", "content": [{"type": "text", "text": reply}]}, *step.messages]
    finally:
        await env.close()


def write_transcript(messages: Sequence[Message], name: str) -> str:
    """Return a row with the messages, and save their pictures."""
    pictures = [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]
    paths = [f"dot_{name}_{number}.png" for number in range(len(pictures))]
    for path, picture in zip(paths, pictures, strict=True):
        picture.save(FOLDER / path)
    texts = ["".join(part.get("text", "<image>") for part in message["content"]) for message in messages]
    written = [{"role": message["role"], "content": text} for message, text in zip(messages, texts, strict=True)]
    return json.dumps({"messages": written, "images": paths})


if __name__ == "__main__":
    if "demonstrate" in sys.argv:
        sys.exit(asyncio.run(demonstrate()))
    defaults = [*SETTINGS, *(SFT if "stage=sft" in sys.argv else RL)]
    model = Path(next(word for word in reversed([*defaults, *sys.argv]) if word.startswith("model.path=")).partition("=")[2])
    if not model.exists():
        before = "bash launch/quickstart.sh" if "stage=sft" in sys.argv else "the second command of this file"
        sys.exit(f"error: model.path={model}: no such folder; {before} creates it")
    sys.argv[1:1] = defaults
    cli()
