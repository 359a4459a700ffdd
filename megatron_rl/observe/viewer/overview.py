"""Overview of runs: how they ended, their last figures, and the settings in which they differ."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from pyarrow import compute

from megatron_rl.config.alarms import MIN_WINDOW, AlarmSettings
from megatron_rl.io.bounded_files import flatten, read_bytes, read_yaml
from megatron_rl.observe.alarms import METRIC_PREFIX, find_alarms
from megatron_rl.observe.metrics import METRICS_FILE
from megatron_rl.observe.viewer.filters import find_mixed_groups
from megatron_rl.observe.viewer.store import CONFIG, MAX_TEXT_CHARS, RunFolder
from megatron_rl.types import ACCURACY_TERM

pc = cast(Any, compute)  # pyarrow creates these functions when it is imported, so their types are unknown
EVALUATION, ENDED = "eval.json", "ended.json"
MAX_ENDED_BYTES = 1 << 20
ENDS = ("stopped", "failed")
"""States in ended.json."""
OVERVIEW_METRICS = ("reward/mean", "eval/greedy_success", "loss", "rollout_mismatch/logprob_abs_diff_max")
MAX_SETTING_CHARS = 80
"""Maximum length in characters of the value of a setting."""
ACTIVE_STEPS, MIN_ACTIVE_S = 5, 120.0
"""A run without a recorded end counts as running for this number of steps, in the duration of its
last step, or for this time in seconds after its last step, whichever is longer.
"""


def make_overview(folders: Mapping[str, RunFolder]) -> dict[str, Any]:
    """Return state, last figures and settings of the runs, and the settings that differ.

    Runs without a readable configuration are not compared.
    """
    settings = {name: _read_settings(folder.path) for name, folder in folders.items()}
    keys = sorted({key for given in settings.values() for key in given} - {"run.dir"})
    texts = {name: {key: str(value)[:MAX_SETTING_CHARS] for key, value in given.items()} for name, given in settings.items()}
    return {
        "differing": [key for key in keys if len({given.get(key, "") for given in texts.values() if given}) > 1],
        "runs": [_overview_row(name, folder, settings[name]) | {"settings": texts[name]} for name, folder in folders.items()],
    }


def _overview_row(name: str, folder: RunFolder, settings: Mapping[str, Any]) -> dict[str, Any]:
    lines = folder.metrics()
    figures = {metric: next((line[metric] for line in reversed(lines) if metric in line), None) for metric in OVERVIEW_METRICS}
    steps = settings.get("sft.steps", [0]) if settings.get("stage") == "sft" else [settings.get("run.steps", 0)]
    last = max((int(line["step"]) for line in lines if "time/update" in line or "reward/mean" in line), default=None)
    is_known = isinstance(steps, list) and all(isinstance(each, int) for each in steps)
    age_s, step_s = _seconds_since_last_step(folder.path), lines[-1].get("time/total", 0.0) if lines else 0.0
    state, reason = _read_end(folder.path)
    is_active = age_s is not None and age_s < max(ACTIVE_STEPS * step_s, MIN_ACTIVE_S)
    return {
        "name": name, "state": state or ("running" if is_active else ""), "reason": reason, "num_done": None if last is None else last + 1,
        "num_steps": sum(steps) if is_known else 0, "age_s": age_s, "figures": figures,
        "alarms": _find_alarms(lines, settings),
    }  # fmt: skip


def _find_alarms(lines: Sequence[Mapping[str, float]], settings: Mapping[str, Any]) -> list[str]:
    """Return the alarms of a run, each as the line that the run printed.

    The rules are applied again only if the run recorded an alarm, because this takes about 0.6 s
    per 1,000 steps.
    """
    recorded = {name for line in lines for name, value in line.items() if name.startswith(METRIC_PREFIX) and value > 0}
    if not recorded:
        return []
    window = settings.get("alarms.window")
    alarms = find_alarms(lines, AlarmSettings(window=window) if isinstance(window, int) and window >= MIN_WINDOW else AlarmSettings())
    return [f"step {alarm.step}: {alarm}" for alarm in alarms if f"{METRIC_PREFIX}{alarm.name}" in recorded]


def make_example_rows(folder: RunFolder, *, limit: int) -> list[dict[str, Any]]:
    """Return one row per example with its mean rewards, lowest mean first.

    `early` and `late` are the mean rewards in the first and the second half of the example's scored
    rollouts, in the order of the steps; both are None with fewer than two. `solved` is the number
    of rollouts in which the term `accuracy` is 1; None without this term. `mixed` and `groups` are
    the numbers of groups with different rewards and of all groups. At most `limit` rows are
    returned.
    """
    table = folder.rollout_table()
    table = table.append_column("is_mixed", find_mixed_groups(table, of=table))
    table = table.select(["example_id", "step", "row_index", "group", "is_mixed", "reward", "reward_terms", "question", "answer"])
    table = table.filter(pc.is_finite(pc.fill_null(table["reward"], math.nan)))
    order = [("example_id", "ascending"), ("step", "ascending"), ("row_index", "ascending")]
    rows = table.take(pc.sort_indices(table, sort_keys=order)).to_pylist()
    found = []
    for example, group in groupby(rows, key=itemgetter("example_id")):
        members = list(group)
        rewards, half = [row["reward"] for row in members], len(members) // 2
        accuracies = [value for row in members for name, value in row["reward_terms"] or () if name == ACCURACY_TERM]
        groups = {(row["step"], row["group"]): row["is_mixed"] for row in members}
        found.append({
            "example_id": example, "question": (members[0]["question"] or "")[:MAX_TEXT_CHARS], "answer": members[0]["answer"] or "",
            "rollouts": len(rewards), "solved": sum(value >= 1 for value in accuracies) if accuracies else None,
            "groups": len(groups), "mixed": sum(groups.values()),
            "mean": fmean(rewards), "lowest": min(rewards), "highest": max(rewards),
            "early": fmean(rewards[:half]) if half else None, "late": fmean(rewards[-half:]) if half else None,
        })  # fmt: skip
    return sorted(found, key=itemgetter("mean"))[:limit]


def _read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a run by dotted key; empty if they cannot be read."""
    try:
        return flatten(read_yaml(path / CONFIG))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _read_end(path: Path) -> tuple[str, str]:
    """Return how a run ended (finished, stopped or failed) and the last line that it printed.

    Both are "" if no end is recorded.
    """
    if (path / EVALUATION).is_file():
        return "finished", ""
    try:
        ended = json.loads(read_bytes(path / ENDED, at_most=MAX_ENDED_BYTES))
        state, line = ended["state"], ended["line"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return "", ""
    return (state, line[:MAX_TEXT_CHARS]) if state in ENDS and isinstance(line, str) else ("", "")


def _seconds_since_last_step(path: Path) -> float | None:
    """Return the time since metrics.jsonl was written; None if there is no such file."""
    file = path / METRICS_FILE
    return time.time() - file.stat().st_mtime if file.is_file() else None
