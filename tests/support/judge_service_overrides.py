"""Overrides of a run whose judge is a service, started by the run or by another job: vLLM's own
server on a CPU with a nano model with random weights.
"""

import json
from pathlib import Path

from PIL import Image

JUDGE_ARGS = (
    "[--dtype,float32,--enforce-eager,--max-model-len,4096,--kv-cache-memory-bytes,67108864,"
    '--structured-outputs-config.backend,xgrammar,--structured-outputs-config.disable_any_whitespace,"true"]'
)
"""Arguments of the judge server. A JSON schema makes the nano's responses valid verdicts, as in
tests/e2e/test_judge_server.py. The server needs TORCHDYNAMO_DISABLE=1 in its environment.
"""
TINY_OVERRIDES = (
    "model.min_pixels=3136", "model.max_pixels=4000", "engine.kv_cache_mib=16", "engine.max_model_len=4096", "task.max_turns=1",
    "task.max_new_tokens=4", "task.eval_samples=0", "batch.prompts_per_step=2", "batch.group_size=2",
)  # fmt: skip


def judge_run_overrides(home: Path, model: Path) -> list[str]:
    """Return the overrides of a run on a question with an image.

    A judge grades every answer, and the verdicts are cached in home/verdicts.sqlite.
    """
    Image.new("RGB", (84, 56), "red").save(home / "red.png")
    row = {"question": "What is 2 + 2?", "answer": "4", "data_source": "mine", "images": ["red.png"]}
    (home / "mine.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    return [
        f"model.path={model}", f"run.dir={home}/run", "task=visual_python", "task.tool_format=codev", "task.reward=codev",
        f"task.data.train=[{home}/mine.jsonl]", f"task.data.eval=[{home}/mine.jsonl]", "judge=vision", "task.judge.urls=[service:judge]",
        f"task.judge.cache={home}/verdicts.sqlite", *TINY_OVERRIDES,
    ]  # fmt: skip
