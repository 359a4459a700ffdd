"""Train on answers that only a judge can grade.

    python examples/judge.py stage=sft
    python examples/judge.py

The policy names the color of a square. The reference says "red", the policy says "crimson" or
"navy": rules cannot decide that, so a judge does. This file starts a stand-in for a judge model, a
server with the OpenAI chat API that looks the words up in a table. To use a real model, add
'task.judge.urls=[http://HOST:18901/v1]' (docs/judges.md) to the second command.

The first command teaches the words; 60% of the demonstrations name a wrong color. The second one
trains with GRPO on the judge's verdicts. Expect `return` to rise, and a last line that counts them.
"""

import json
import random
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from PIL import Image

from megatron_rl.cli import cli

RUNS = Path("runs/examples/judge")
WORDS = {"red": ("crimson", "scarlet"), "green": ("emerald", "olive"), "blue": ("navy", "azure"), "yellow": ("golden", "lemon")}
DATA = [
    f"task.data.train=[{RUNS}/train.jsonl]",
    f"task.data.eval=[{RUNS}/train.jsonl]",
    "task.prompt='{question}'",
    "task.max_new_tokens=24",
]
COMMON = ["task=vqa", "model.min_pixels=3136", "model.max_pixels=3200", "engine.kv_cache_mib=64", "engine.max_model_len=256", *DATA]
SFT = ["model.path=runs/quickstart/nano", f"run.dir={RUNS}/sft", "sft.splits=[transcripts]", "sft.steps=[60]", "sft.batch_size=32",
       "optim.lr=2e-3", f"task.data.demonstrations=[{RUNS}/transcripts.jsonl]"]  # fmt: skip
RL = [f"model.path={RUNS}/sft/final", f"run.dir={RUNS}/grpo", "run.steps=20", "optim.lr=3e-4", "batch.prompts_per_step=8",
      "batch.group_size=8", "judge=text"]  # fmt: skip


def write_data() -> None:
    """Write pictures, questions and transcripts to RUNS."""
    RUNS.mkdir(parents=True, exist_ok=True)
    dice, asked = random.Random(0), "<image>What color is it?"
    with (RUNS / "train.jsonl").open("w") as questions, (RUNS / "transcripts.jsonl").open("w") as transcripts:
        for color in WORDS:
            Image.new("RGB", (56, 56), color).save(RUNS / f"{color}.png")
            images = {"images": [f"{color}.png"]}
            print(json.dumps({"question": asked, "answer": color, **images}), file=questions)
            for _ in range(50):
                word = dice.choice(WORDS[color if dice.random() < 0.4 else dice.choice([*WORDS])])
                said = {"role": "assistant", "content": f"<answer>{word}</answer>"}
                print(json.dumps({"messages": [{"role": "user", "content": asked}, said], **images}), file=transcripts)


class Judge(BaseHTTPRequestHandler):
    """The stand-in for a judge model: decides by WORDS."""

    def do_GET(self) -> None:
        """List the model, as a run asks at its start."""
        self.reply({"object": "list", "data": [{"id": "judge", "object": "model", "created": 0, "owned_by": "me"}]})

    def do_POST(self) -> None:
        """Return a verdict on the reference and the answer at the end of the prompt."""
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
        reference, answer = (json.loads(line.partition(": ")[2]) for line in prompt.splitlines()[-2:])
        verdict = json.dumps({"correct": answer in WORDS[reference]})
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": verdict}}
        self.reply({"id": "1", "object": "chat.completion", "created": 0, "model": "judge", "choices": [choice]})

    def reply(self, body: dict) -> None:
        """Send a JSON body."""
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing for each request."""


if __name__ == "__main__":
    defaults = [*COMMON, *(SFT if "stage=sft" in sys.argv else RL)]
    model = Path(next(word for word in reversed([*defaults, *sys.argv]) if word.startswith("model.path=")).partition("=")[2])
    if not model.exists():
        before = "bash launch/quickstart.sh" if "stage=sft" in sys.argv else "the first command of this file"
        sys.exit(f"error: model.path={model}: no such folder; {before} creates it")
    write_data()
    if "stage=sft" not in sys.argv and not any(word.startswith("task.judge.urls=") for word in sys.argv):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        defaults.append(f"task.judge.urls=[http://127.0.0.1:{server.server_port}/v1]")
    sys.argv[1:1] = defaults
    cli()
