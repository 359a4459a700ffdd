"""Report of an evaluation: scores with confidence intervals, and the conditions of the evaluation.

The report includes conditions such as the prompt and the limits, because the evaluation harness
alone can change a score by 7 points.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_rl.config import Settings
from megatron_rl.data.benchmarks.benchmark_scores import INTERVAL_PERCENTILES, SEED
from megatron_rl.evaluation.results_directory import PROMPT_FILE
from megatron_rl.rollout.task import Task
from megatron_rl.rollout.vllm.server_command import VLLM_VERSION
from megatron_rl.types import ACCURACY_TERM, Example, Rollout

NUM_RESAMPLES = 10_000
RESULT_COLUMNS = ("solved", "credit", "rewards", "stop_reasons", "responses")
"""Result columns with one entry per episode of an example. `credit` is the accuracy term, or, for
tasks without an accuracy term, 1 for a solved episode and 0 for an unsolved episode.
"""


def collect_example_results(task: Task, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    """Return one record per example with at least one scored episode.

    A record contains the results and responses of the example's scored episodes.
    """
    lines: dict[int, dict[str, Any]] = {}
    for rollout in rollouts:
        if not rollout.is_scored:
            continue
        line = lines.setdefault(rollout.group, {"id": examples[rollout.group].id, **{name: [] for name in RESULT_COLUMNS}})
        solved = float(task.success(rollout))
        line["solved"].append(solved)
        line["credit"].append(rollout.reward_terms.get(ACCURACY_TERM, solved))
        line["rewards"].append(rollout.reward)
        line["stop_reasons"].append(str(rollout.stop_reason))
        line["responses"].append([turn.text for turn in rollout.turns])
    return [lines[group] for group in sorted(lines)]


def bootstrap_interval(means: Sequence[float]) -> tuple[float, float]:
    """Return the 95% bootstrap confidence interval of the mean over examples.

    `means` contains one mean per example. The means are resampled with replacement (Efron 1979),
    using a fixed seed. If all means are equal, both ends of the interval are equal to this mean.
    """
    values, dice = np.asarray(means), np.random.default_rng(SEED)
    drawn = [values[dice.integers(len(values), size=len(values))].mean() for _ in range(NUM_RESAMPLES)]
    low, high = np.percentile(drawn, INTERVAL_PERCENTILES)
    return float(low), float(high)


def pass_at_k(k: int, solved: Sequence[Sequence[float]]) -> float:
    """Return pass@k, the mean probability that at least one of an example's k episodes is solved.

    The estimator is unbiased: 1 - C(n - c, k) / C(n, k) for an example with n episodes, of which c
    are solved (arXiv 2107.03374, equation 1).
    """
    counts = [(len(each), sum(value > 0 for value in each)) for each in solved]
    return sum(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts) / len(counts)


def compute_success_statistics(example_results: Sequence[Mapping[str, Any]], *, samples: int) -> dict[str, float]:
    """Return the confidence interval for the success rate, and pass@k for powers of two.

    The values of k are 1, 2, 4, ... up to `samples`. The interval treats the examples as a random
    sample. The metric pass@k is computed only if `samples` is greater than 1, and only from
    examples for which all episodes were scored.
    """
    solved = [line["solved"] for line in example_results]
    low, high = bootstrap_interval([sum(each) / len(each) for each in solved])
    whole = [each for each in solved if len(each) == samples]
    powers = [2**power for power in range(samples.bit_length()) if samples > 1 and whole]
    return {"success_low": low, "success_high": high, **{f"pass_at_{k}": pass_at_k(k, whole) for k in powers}}


def describe_conditions(settings: Settings, *, num_examples: int, prompt: str) -> dict[str, str]:
    """Return the conditions on which the scores depend, as text keyed by name.

    `prompt` is the text stored in PROMPT_FILE: the first prompt of the first example.
    """
    task, judge, given = settings.task, settings.task.judge, settings.evaluation
    turns, length = task.eval_max_turns or task.max_turns, settings.engine.max_model_len
    digest = hashlib.sha256(prompt.encode()).hexdigest()[:12]
    data = task.data
    order = f"options shuffled with seed {data.shuffle_options}" if data.shuffle_options else "options as published"
    asked = f"{judge.model or 'the served model'} at {', '.join(judge.urls) or 'a service of the run'}"
    return {
        "task": task.name,
        "data": ", ".join(task.data.train if given.split == "train" else task.data.eval) or "the task's own",
        "benchmark": f"{data.benchmark}, {order}, up to {data.frames} images" if data.benchmark else "none",
        "examples": f"{num_examples} of split {given.split}, {given.samples} episodes each, seed {settings.run.seed}",
        "model": settings.model.path,
        "weights": f"served by {', '.join(given.urls)}" if given.urls else given.weights or "the model's own",
        "pixels": f"{settings.model.min_pixels} to {settings.model.max_pixels}",
        "sampling": "greedy" if given.temperature == 0 else f"temperature {given.temperature}",
        "limits": f"{turns} turns of {task.max_new_tokens} tokens, {length} per sequence",
        "prompt": f"{len(prompt)} characters, sha256 {digest} ({PROMPT_FILE})",
        "tool_format": task.tool_format,
        "reward": task.reward or "the task's own",
        "judge": asked if judge.urls or judge.model else "none",
        "harness": "megatron_rl, an OpenAI-compatible endpoint"
        if given.urls
        else f"megatron_rl, vllm {VLLM_VERSION}, {settings.engine.dtype}",
    }


def print_report(scores: Mapping[str, float], conditions: Mapping[str, str], console: Console) -> None:
    """Print the scores and the conditions as two tables."""
    found, condition_table = Table("figure", "value"), Table("evaluation condition", "")
    for name, value in scores.items():
        found.add_row(name, f"{value:.4g}")
    for name, text in conditions.items():
        condition_table.add_row(name, text)
    for table in (found, condition_table):
        console.print(table, markup=False)
