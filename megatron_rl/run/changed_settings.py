"""Compares the settings of a run with those in its directory's config.yaml.

A setting counts as changed if its value differs, or if only one of the two contains it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.io.bounded_files import read_yaml

MUTABLE_KEYS = (
    "parallel.", "engine.", "checkpoint.", "wandb.", "trackio.", "services.", "slurm.", "run.dir", "plan.", "run.overwrite",
    "run.grace_s", "run.max_failed_fraction", "run.max_logprob_abs_diff", "run.outage_timeout_s", "rollouts.save", "rollouts.max_gb",
    "rollouts.keep_best", "rollouts.keep_worst", "run.trace", "task.judge.urls", "task.judge.token_file",
    "task.judge.outage_timeout_s", "task.sandbox.url", "task.sandbox.token_file", "task.options.processes", "task.options.call_s",
    "task.listener.", "task.speaker.", "task.options.held_out_listeners.", "task.options.held_out_token_files.", "task.options.log",
    "task.options.sheets", "evaluation.urls", "evaluation.timeout_s", "evaluation.outage_timeout_s", "evaluation.max_attempts",
    "evaluation.concurrency", "alarms.", "task.judge.audit_fraction",
)  # fmt: skip
"""Names or prefixes of the settings that may change when a run resumes, because they do not affect
the trained model.
"""
_USER_KEYED_SETTINGS = ("optim.lr_by_module", "task.options")
"""Settings with user-defined keys. If the keys differ, `changed_keys` reports the setting as one
change instead of one change per key.
"""
ABSENT = "absent"
"""Placeholder for the value of a missing setting."""


def read_settings(path: Path) -> dict[str, Any]:
    """Return the contents of a run's config.yaml.

    Raises:
        ValueError: The file does not contain settings. The message continues a sentence that starts
            with the file's name.
        OSError: The file cannot be read.
    """
    found = read_yaml(path)
    if not isinstance(found, dict):
        raise ValueError(f"must contain settings, not {type(found).__name__}")
    return found


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Return {dotted key: (old, new)} for settings that differ; a missing key has value ABSENT."""
    changes: dict[str, tuple[Any, Any]] = {}
    for key in sorted(old.keys() | new.keys()):
        before: Any = old.get(key, ABSENT)
        after: Any = new.get(key, ABSENT)
        are_groups = isinstance(before, dict) and isinstance(after, dict)
        if are_groups and (prefix + key not in _USER_KEYED_SETTINGS or before.keys() == after.keys()):
            changes |= changed_keys(before, after, f"{prefix}{key}.")
        elif before != after:
            changes[prefix + key] = (before, after)
    return changes


def is_mutable_key(key: str, old: Any, new: Any) -> bool:
    """Return True if a resumed run may use the new value of a setting.

    run.steps and run.epochs may be increased but not decreased, and a run may change from one of
    them to the other. In sft.steps, only the last entry may be increased, because the earlier
    stages are already completed.
    """
    if key == "run.epochs":
        return ABSENT in (old, new) or 0 in (old, new) or new >= old
    if key in ("run.steps", "sft.steps") and old != ABSENT:
        return new >= old if key == "run.steps" else old[:-1] == new[:-1] and new[-1:] >= old[-1:]
    return any(key.startswith(free) if free.endswith(".") else key == free for free in MUTABLE_KEYS)


def describe_changes(changes: Mapping[str, tuple[object, object]]) -> str:
    """Return the changed settings as text, such as `run.steps=80 (was 40)`."""
    return ", ".join(f"{key}={new} (was {old})" for key, (old, new) in changes.items())
