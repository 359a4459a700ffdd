"""Definition of a sweep: a YAML file that specifies many runs.

    overrides: [experiment=numberline_grpo_cpu, run.steps=20]    # common to all runs
    grid: {algo: [grpo, gspo], optim.lr: [1e-4, 2e-4]}           # all combinations
    list: [{algo: grpo}, {algo: gspo, optim.lr: 1e-4}]           # or these runs
    random: {draws: 12, seed: 0, optim.lr: {log: [1e-5, 1e-3]},  # or random draws
             algo.clip_ratio_high: {uniform: [0.2, 0.4]}, algo: [grpo, gspo]}
    folder: runs/lr                                              # parent of the run directories;
                                                                 # default: runs/NAME-OF-THE-YAML
    processes: 2                                                 # per run; default: one per GPU
                                                                 # that Slurm assigns, else 1

Exactly one of grid, list and random must be given. In a grid, the last key varies fastest. Random
draws with the same seed do not change if `draws` is increased or a key is added. Values are kept as
text; Hydra parses them when the settings are composed (launcher/sweep.py).
"""

import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from megatron_rl.config import require
from megatron_rl.io.bounded_files import read_yaml

SEARCH_KINDS = ("grid", "list", "random")
SWEEP_KEYS = ("overrides", *SEARCH_KINDS, "folder", "processes")
MAX_NAME_CHARS = 200
"""Maximum length of a run directory's name in characters; file systems allow 255 bytes."""


@dataclass(slots=True, frozen=True, kw_only=True)
class SweepTask:
    """One run of a sweep."""

    index: int
    parameters: Mapping[str, str]
    """Overrides that distinguish this run from the sweep's other runs, as {key: value}."""
    overrides: Sequence[str]
    """All overrides on the run's command line; run.dir is the last one."""
    folder: Path


@dataclass(slots=True, frozen=True, kw_only=True)
class Sweep:
    """A sweep, read from its YAML file."""

    path: Path
    folder: Path
    num_processes: int
    """Number of processes per run. With 0, each run has one process per GPU that Slurm assigns, or
    a single process if Slurm assigns no GPU.
    """
    tasks: Sequence[SweepTask]

    def task(self, index: int) -> SweepTask:
        """Return the task at `index`. Raises ValueError if the index is out of range."""
        last = len(self.tasks) - 1
        require(0 <= index <= last, "--task", index, f"{self.path} has tasks 0 to {last}; use sbatch --array=0-{last}")
        return self.tasks[index]


def read_sweep(path: Path) -> Sweep:
    """Read a sweep's YAML file without composing the settings.

    Raises:
        ValueError: The file is invalid, defines no runs, or defines two runs with the same
            directory.
    """
    given = _read_yaml(path)
    unknown = sorted(given.keys() - {*SWEEP_KEYS})
    require(not unknown, f"{path}: {'.'.join(unknown[:1])}", "...", f"unknown sweep key; known keys are {', '.join(SWEEP_KEYS)}")
    kinds = [kind for kind in SEARCH_KINDS if kind in given]
    require(len(kinds) == 1, f"{path}", "+".join(kinds) or "(none)", f"define the runs with exactly one of {', '.join(SEARCH_KINDS)}")
    common = given.get("overrides", [])
    require(_is_text_list(common), f"{path}: overrides", common, "expects a list of overrides, [key=value, ...]")
    processes, folder = given.get("processes", "0"), given.get("folder") or f"runs/{path.stem}"
    require(
        str(processes).isdigit(),
        f"{path}: processes",
        processes,
        "expects a whole number; omit this key to use one process per GPU that Slurm assigns",
    )
    require(isinstance(folder, str), f"{path}: folder", folder, "expects a folder name")
    points = list(EXPANDERS[kinds[0]](given[kinds[0]], f"{path}: {kinds[0]}"))
    require(bool(points), f"{path}: {kinds[0]}", given[kinds[0]], "is empty and defines no runs; add at least one key with its values")
    tasks = [_make_task(index, own, common, Path(folder)) for index, own in enumerate(points)]
    _check_folders(tasks, path)
    return Sweep(path=path, folder=Path(folder), num_processes=int(processes), tasks=tasks)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        given = read_yaml(path, as_text=True)
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such file; give the YAML file of a sweep (example: launch/slurm/example.yaml)") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    require(isinstance(given, dict), str(path), "...", f"expects keys with values; known keys are {', '.join(SWEEP_KEYS)}")
    return given


def expand_grid(given: Any, location: str) -> Iterator[dict[str, str]]:
    """Yield the parameters of each run in a grid: every combination of the values.

    Example: {a: [1, 2], b: [x, y]} -> a=1 b=x, a=1 b=y, a=2 b=x, a=2 b=y.
    """
    require(isinstance(given, dict), location, given, "expects keys with lists of values")
    for key, values in given.items():
        require(isinstance(values, list), f"{location}.{key}", values, f"expects a list of values; write [{values}]")
        require(bool(values), f"{location}.{key}", "[]", "is empty: an empty grid defines no run; give values, or leave the key out")
    if given:
        for values in product(*given.values()):
            yield {key: _to_override_text(value, f"{location}.{key}") for key, value in zip(given, values, strict=True)}


def expand_list(given: Any, location: str) -> Iterator[dict[str, str]]:
    """Yield the parameters of each listed run."""
    require(isinstance(given, list), location, given, "expects a list of {key: value, ...}")
    for number, own in enumerate(given):
        require(isinstance(own, dict), f"{location}[{number}]", own, "expects {key: value, ...}")
        yield {key: _to_override_text(value, f"{location}[{number}].{key}") for key, value in own.items()}


def expand_random(given: Any, location: str) -> Iterator[dict[str, str]]:
    """Yield the parameters of randomly drawn runs, with one random generator per key.

    Values are drawn uniformly, log-uniformly, or from a list.
    """
    require(isinstance(given, dict), location, given, "expects draws, seed, and keys with the values to draw from")
    for key in ("draws", "seed"):
        require(str(given.get(key, "")).isdigit(), f"{location}.{key}", given.get(key, "(none)"), "expects a whole number")
    keys = {key: _parse_range(source, f"{location}.{key}") for key, source in given.items() if key not in ("draws", "seed")}
    require(bool(keys), location, given, "defines no key to draw values for; give KEY: {log: [1e-5, 1e-3]}, {uniform: [0, 1]} or [a, b]")
    generators = {key: random.Random(f"{given['seed']} {key}") for key in keys}
    for _ in range(int(given["draws"])):
        yield {key: _draw_value(source, generators[key]) for key, source in keys.items()}


EXPANDERS = {"grid": expand_grid, "list": expand_list, "random": expand_random}


def _parse_range(candidates: Any, where: str) -> list[str] | tuple[str, float, float]:
    if isinstance(candidates, list):
        require(bool(candidates), where, "[]", "is empty; give values to choose from")
        return [_to_override_text(value, where) for value in candidates]
    remedy = "expects {log: [LOW, HIGH]}, {uniform: [LOW, HIGH]}, or a list to choose from"
    require(isinstance(candidates, dict) and len(candidates) == 1 and {*candidates} <= {"log", "uniform"}, where, candidates, remedy)
    ((how, bounds),) = candidates.items()
    try:
        low, high = (float(bound) for bound in bounds)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}.{how}={bounds}: expects two numbers, [LOW, HIGH]") from error
    require(low < high and math.isfinite(high - low), f"{where}.{how}", bounds, "expects two numbers, the lower one first")
    require(how == "uniform" or low > 0, f"{where}.{how}", bounds, "a log range requires bounds above 0")
    return how, low, high


def _draw_value(candidates: list[str] | tuple[str, float, float], generator: random.Random) -> str:
    """Draw a value, rounded to three significant digits to keep the run directory's name short."""
    if isinstance(candidates, list):
        return generator.choice(candidates)
    how, low, high = candidates
    value = generator.uniform(low, high) if how == "uniform" else math.exp(generator.uniform(math.log(low), math.log(high)))
    return f"{value:.3g}"


def _to_override_text(value: Any, where: str) -> str:
    """Convert a YAML value to Hydra's command-line syntax.

    Example: [vision, merger] -> [vision,merger].
    """
    if isinstance(value, list):
        return f"[{','.join(_to_override_text(each, where) for each in value)}]"
    require(isinstance(value, str), where, value, "expects a value or a list; write a nested key with dots, a.b: value")
    return value


def _is_text_list(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _make_task(index: int, parameters: Mapping[str, str], common: Sequence[str], parent: Path) -> SweepTask:
    folder = parent / run_folder_name(parameters)
    words = [*common, *(f"{key}={value}" for key, value in parameters.items())]
    for word in words:
        told = f"task {index}: {word.partition('=')[0]}"
        require(
            word.lstrip("+").partition("=")[0] != "run.dir",
            told,
            word.partition("=")[2],
            "a sweep sets run.dir itself; set the sweep's folder instead",
        )
    require(
        len(folder.name) <= MAX_NAME_CHARS,
        f"task {index}: run.dir",
        folder,
        f"the name has more than {MAX_NAME_CHARS} characters; use shorter values",
    )
    return SweepTask(index=index, parameters=parameters, overrides=[*words, f"run.dir={folder}"], folder=folder)


def run_folder_name(parameters: Mapping[str, str]) -> str:
    """Return a run directory name that requires no quotes in Hydra or in a shell.

    Example: {algo: gspo, optim.lr: 2e-4} -> algo_gspo+optim.lr_2e-4.
    """
    return "+".join(f"{_sanitize(key)}_{_sanitize(value)}" for key, value in parameters.items()) or "as_it_is"


def _sanitize(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text, flags=re.ASCII).strip("_")


def _check_folders(tasks: Sequence[SweepTask], path: Path) -> None:
    counts = Counter(task.folder for task in tasks)
    twice = [folder for folder, count in counts.items() if count > 1]
    if twice:
        indices = [str(task.index) for task in tasks if task.folder == twice[0]]
        told = f"{path}: run.dir={twice[0]}: is used by tasks {', '.join(indices)}; define every run once"
        raise ValueError(f"{told}, or give the tasks different values of a key such as run.seed")
