"""Python API: `train` and `evaluate` with keyword arguments in place of a command line."""

import difflib
import hashlib
import inspect
import io
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image

from megatron_rl.algo.algorithms import Algorithm
from megatron_rl.callbacks import Callback, Callbacks
from megatron_rl.cli.config_errors import setting_keys
from megatron_rl.cli.config_file import GROUPS, format_override_value
from megatron_rl.compat.startup import ignore_library_warnings
from megatron_rl.config import Settings
from megatron_rl.entrypoints.evaluate import run_evaluation
from megatron_rl.entrypoints.train import run
from megatron_rl.io.jsonl import write_bytes_atomically
from megatron_rl.launcher.compose import compose_settings
from megatron_rl.registry import Plugins
from megatron_rl.rollout.task import Task
from megatron_rl.run.result import Result

Rows: TypeAlias = Iterable[Mapping[str, object]]
Data: TypeAlias = str | Path | Sequence[str | Path] | Rows
"""Files or data sets by name, or the rows themselves, such as a `datasets.Dataset`."""
RewardFunction: TypeAlias = Callable[..., object]
OPTION_GROUPS = ("stage", *GROUPS)
"""Arguments that select a YAML file or a stage."""


def train(
    model: str | Path = "", *,
    data: Data = (), eval_data: Data = (), run_dir: str | Path = "", reward: str | RewardFunction | Sequence[RewardFunction] = "",
    tasks: Mapping[str, type[Task]] | None = None, algorithms: Mapping[str, Algorithm] | None = None,
    after_step: Callback | None = None, after_evaluation: Callback | None = None, **overrides: object,
) -> Result:  # fmt: skip
    """Train a model and return the result of the run.

    Every rank must call this function. A stopped run resumes when it is called with the same
    arguments.

        from megatron_rl import train

        train("3b", data="mine.jsonl", eval_data="test.jsonl", reward=exact, run_dir="runs/mine")

    Args:
        model: Model folder, or name of a model in the local cache of the Hugging Face hub.
        data: Training data: a file, a folder or a data set name, a list of them, or rows. A row is
            a mapping with a question, an answer and images (docs/data.md); images are PIL images or
            paths. Rows are written to RUN_DIR_data/.
        eval_data: Evaluation data, in the same form.
        run_dir: Run directory; the default is that of the recipe, or runs/TASK.
        reward: Name of a built-in reward, a reward function (docs/extend.md), or several functions,
            which are added. Functions in the form of TRL are accepted.
        tasks: User-defined tasks, keyed by name.
        algorithms: User-defined algorithms, keyed by name.
        after_step: Function of (completed steps, metrics), called on rank 0 after each step; if it
            returns True, training ends, and the model is evaluated and saved.
        after_evaluation: Function of (completed steps, scores), called after each evaluation, also
            able to end training.
        **overrides: Settings. A key is written with underscores in place of dots (`optim_lr=1e-6`)
            or as `**{"optim.lr": 1e-6}`. `experiment`, `task`, `algo`, `judge` and `stage` select
            a recipe, a task, an algorithm, a judge and the stage. The task is vqa if `data` is
            given and no recipe or task is.

    Raises:
        ValueError: A setting is unknown or invalid.
        megatron_rl.errors.RunFailed: The run cannot continue.
    """
    words, rewards = _collect_words(model, {"train": data, "eval": eval_data}, run_dir, reward, overrides)
    plugins = Plugins(
        tasks=tasks or {}, rewards=rewards, algorithms=algorithms or {},
        callbacks=Callbacks(after_step=after_step, after_evaluation=after_evaluation),
    )  # fmt: skip
    with warnings.catch_warnings():
        ignore_library_warnings()
        result = run(compose_settings(words), plugins)
    if result is None:
        raise ValueError("plan_only=True: prints a memory plan and returns no result; use python -m megatron_rl train plan.only=true")
    return result


def evaluate(
    model: str | Path = "", *,
    data: Data = (), run_dir: str | Path = "", reward: str | RewardFunction | Sequence[RewardFunction] = "",
    tasks: Mapping[str, type[Task]] | None = None, samples: int = 1, temperature: float | None = None, **overrides: object,
) -> dict[str, float] | None:  # fmt: skip
    """Evaluate a model and return its scores; None if a signal stopped the evaluation.

        from megatron_rl import evaluate

        scores = evaluate("runs/mine/final", data="held_out.jsonl", run_dir="runs/evaluations/mine")
        print(scores["success"])

    Args:
        model: Model folder, or name of a model in the local cache of the Hugging Face hub.
        data: Evaluation data, as in `train`.
        run_dir: Folder of the results.
        reward: Reward, as in `train`.
        tasks: User-defined tasks, keyed by name.
        samples: Number of episodes per example.
        temperature: Sampling temperature. The default is 0 (greedy) for one episode per example,
            and 1 for several.
        **overrides: Settings, as in `train`.

    Raises:
        ValueError: A setting is unknown or invalid.
        megatron_rl.errors.RunFailed: Too many episodes failed.
    """
    words, rewards = _collect_words(model, {"eval": data}, run_dir, reward, overrides)
    chosen = temperature if temperature is not None else float(samples > 1)
    words += [f"evaluation.samples={samples}", f"evaluation.temperature={chosen}"]
    with warnings.catch_warnings():
        ignore_library_warnings()
        return run_evaluation(compose_settings(words), Plugins(tasks=tasks or {}, rewards=rewards))


def _collect_words(
    model: str | Path, data: Mapping[str, Data], run_dir: str | Path, reward: str | RewardFunction | Sequence[RewardFunction],
    overrides: Mapping[str, object],
) -> tuple[list[str], dict[str, RewardFunction]]:  # fmt: skip
    """Return the command-line arguments for the arguments of `train`, and the reward functions."""
    options = {key: value for key, value in overrides.items() if key in OPTION_GROUPS}
    settings = [f"{_find_key(key)}={format_override_value(value)}" for key, value in overrides.items() if key not in OPTION_GROUPS]
    given = {split: each for split, each in data.items() if isinstance(each, str | Path) or not isinstance(each, Sequence) or each}
    if given and "task" not in options and "experiment" not in options:
        options["task"] = "vqa"
    if not run_dir and "experiment" not in options:
        run_dir = f"runs/{options.get('task', 'train')}"
    words = [f"{key}={value}" for key, value in options.items()]
    words += [f"model.path={format_override_value(str(model))}"] if model else []
    words += [f"run.dir={format_override_value(str(run_dir))}"] if run_dir else []
    for split, each in given.items():
        files = _find_or_write_data(each, split, run_dir=run_dir)
        words.append(f"task.data.{split}={format_override_value(files)}")
    functions = {} if isinstance(reward, str) else _name_functions([reward] if callable(reward) else reward)
    names = reward if isinstance(reward, str) else "+".join(functions)
    words += [f"task.reward={format_override_value(names)}"] if names else []
    return words + settings, functions


def _name_functions(rewards: Sequence[RewardFunction]) -> dict[str, RewardFunction]:
    """Return reward functions, keyed by their names."""
    functions: dict[str, RewardFunction] = {}
    for each in rewards:
        if not inspect.isfunction(each) or each.__name__ in functions:
            raise ValueError(f"reward={each!r}: must be a function written in Python, with a name of its own")
        functions[each.__name__] = each
    return functions


def _find_key(name: str) -> str:
    """Return the dotted key of a setting that is written with underscores or dots."""
    keys = {key.replace(".", "_"): key for key in setting_keys(Settings)}
    written = name.replace(".", "_")
    if written not in keys:
        closest = difflib.get_close_matches(written, keys, n=1)
        unknown = "python -m megatron_rl train --help all lists the settings"
        hint = f"did you mean {closest[0]} ({keys[closest[0]]})?" if closest else unknown
        raise ValueError(f"{name}: no such argument or setting; {hint}")
    return keys[written]


def _find_or_write_data(data: Data, split: str, *, run_dir: str | Path) -> list[str]:
    """Return the names of data files; rows are written to a file first."""
    if isinstance(data, str | Path):
        return [str(data)]
    entries = list(data)
    names = [str(entry) for entry in entries if isinstance(entry, str | Path)]
    if len(names) == len(entries):
        return names
    if names or not all(isinstance(entry, Mapping) for entry in entries):
        raise ValueError(f"{split} data: must be file names or rows (mappings), and not a mixture")
    if not run_dir:
        raise ValueError("run_dir: is required when the data are rows, which are written to RUN_DIR_data/")
    return [str(write_rows([dict(entry) for entry in entries if isinstance(entry, Mapping)], Path(f"{run_dir}_data") / split))]


def write_rows(rows: Sequence[Mapping[str, object]], folder: Path) -> Path:
    """Write rows to FOLDER.jsonl, and their PIL images to FOLDER/; return the file.

    Equal rows give equal files, so a resumed run finds the data that it started with.

    Raises:
        ValueError: A value cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder.with_suffix(".jsonl")
    lines = []
    for number, row in enumerate(rows):
        try:
            lines.append(json.dumps(_store_images(dict(row), folder), ensure_ascii=False, sort_keys=True, default=_read_numpy))
        except TypeError as error:
            raise ValueError(f"{folder.name} data: row {number}: {error}; use text, numbers, lists, mappings and PIL images") from error
    write_bytes_atomically(file, ("\n".join(lines) + "\n").encode())
    return file


def _read_numpy(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} cannot be written")


def _store_images(value: object, folder: Path) -> object:
    """Replace PIL images inside a value by the names of image files."""
    if isinstance(value, Image.Image):
        content = io.BytesIO()
        value.convert("RGB").save(content, "PNG")
        name = f"{hashlib.sha256(content.getvalue()).hexdigest()[:24]}.png"
        if not (folder / name).exists():
            write_bytes_atomically(folder / name, content.getvalue())
        return f"{folder.name}/{name}"
    if isinstance(value, Mapping):
        return {str(key): _store_images(each, folder) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_store_images(each, folder) for each in value]
    return value
