"""Trains and evaluates from Python, on rows in memory. Run by tests/test_api.py.

    api_run.py MODEL FOLDER

Writes FOLDER/seen.json: what the callbacks received, the result, the scores, and the warnings.
"""

import json
import sys
import warnings
from pathlib import Path

from PIL import Image

COLORS = {"red": (220, 30, 30), "blue": (30, 30, 220)}
SIZES = {
    "model_min_pixels": 12000, "model_max_pixels": 13000, "engine_kv_cache_mib": 32, "engine_max_model_len": 512,
    "task_max_new_tokens": 12,
}  # fmt: skip


def make_rows() -> list[dict[str, object]]:
    return [
        {"question": "What color is the square?", "answer": name, "image": Image.new("RGB", (112, 112), color)}
        for _ in range(4) for name, color in COLORS.items()
    ]  # fmt: skip


def shares_letters(completions: list, answer: list, **columns: object) -> list[float]:
    """Return the share of the answer's letters in each completion, in the form of TRL."""
    assert columns["solution"] == answer and columns["prompts"][0][0]["role"] == "user"
    return [len({*said[0]["content"]} & {*gold}) / len(gold) for said, gold in zip(completions, answer, strict=True)]


def main() -> None:
    model, folder = sys.argv[1], Path(sys.argv[2])
    seen: dict[str, list] = {"steps": [], "evaluations": []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from megatron_rl import evaluate, train

        result = train(
            model, data=make_rows(), eval_data=make_rows()[:2], reward=shares_letters, run_dir=folder / "run", lora_rank=2,
            batch_prompts_per_step=4, batch_group_size=4, run_steps=5, run_eval_every=1, **SIZES, **{"optim.lr": 1e-3},
            after_step=lambda step, metrics: seen["steps"].append((step, metrics["reward/mean"])),
            after_evaluation=lambda step, scores: seen["evaluations"].append((step, scores["greedy_return"])) or step == 2,
        )  # fmt: skip
    scores = evaluate(
        folder / "run" / "final", data=make_rows()[:2], reward=shares_letters, run_dir=folder / "evaluation", **SIZES
    )  # fmt: skip
    told = {
        "result": [str(result.folder), result.step, result.num_steps, result.is_finished], "text": str(result),
        "metrics": result.metrics, "scores": scores, "warnings": [str(each.message) for each in caught],
    }  # fmt: skip
    (folder / "seen.json").write_text(json.dumps(seen | told))


if __name__ == "__main__":
    main()
