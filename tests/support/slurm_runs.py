"""Helpers for small runs that tests submit to Slurm (tests/support/slurm.py): settings, waiting and
comparison.
"""

import time
from pathlib import Path

from megatron_rl.observe.metrics import read_metrics
from tests.support.comparable_metrics import drop_timings

TINY_OVERRIDES = (
    "task=number_line",
    "model.min_pixels=3136", "model.max_pixels=4000", "engine.kv_cache_mib=16", "task.max_turns=1", "task.max_new_tokens=4",
    "task.eval_samples=0", "batch.prompts_per_step=2", "batch.group_size=2", "algo.entropy_coef=0.01",
    "optim.lr=1e-3",
)  # fmt: skip
"""Settings of a run whose steps take a sixth of a second. All its rewards are equal, so only the
entropy bonus changes the weights.
"""


def wait_for_steps(run: Path, num: int, *, timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while not ((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text().count("\n") >= num):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_outputs(tree: Path) -> str:
    """Return the output of all jobs, for the message of a failing test."""
    return "\n".join(f"{path}:\n{path.read_text()}" for path in [*tree.glob("*.out"), *tree.glob("runs/**/output.txt")])


def check_equal_runs(resumed: Path, unbroken: Path) -> None:
    """Check that both runs have equal metrics except timings, equal evaluations, and bitwise equal
    weights.
    """
    left, expected = ([drop_timings(line) for line in read_metrics(run / "metrics.jsonl")] for run in (resumed, unbroken))
    assert left == expected and len({line.get("loss") for line in expected}) > 0.9 * len(expected), "nothing to tell apart"
    assert (resumed / "eval.json").read_bytes() == (unbroken / "eval.json").read_bytes()
    weights = [[path.read_bytes() for path in sorted((run / "final").glob("*.safetensors"))] for run in (resumed, unbroken)]
    assert weights[0] == weights[1] != []
