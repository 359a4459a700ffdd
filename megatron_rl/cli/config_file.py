"""Reads command-line arguments from a YAML file (`--config mine.yaml`).

Example:
    experiment: numberline_grpo_cpu      # same as experiment=numberline_grpo_cpu
    task: vqa                            # same as task=vqa
    optim: {lr: 1e-4}                    # same as optim.lr=1e-4
    task.data.train: [mine.jsonl]        # same as 'task.data.train=[mine.jsonl]'
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

GROUPS = ("experiment", "task", "algo", "judge")
"""Keys that select a YAML file in configs/ by its name."""


def expand_config_flags(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with each `--config FILE` replaced by the arguments in the file.

    The arguments of a file precede all others, so that the command line wins.

    Raises:
        ValueError: A file is missing or is not a YAML mapping.
    """
    files: list[str] = []
    others: list[str] = []
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        if word == "--config":
            if not remaining:
                raise ValueError("--config: needs the path of a YAML file")
            files.append(remaining.pop(0))
        elif word.startswith("--config="):
            files.append(word.partition("=")[2])
        else:
            others.append(word)
    return [override for file in files for override in read_config_file(Path(file))] + others


def read_config_file(path: Path) -> list[str]:
    """Return the overrides in a YAML file, groups first.

    Raises:
        ValueError: The file is missing or is not a YAML mapping.
    """
    if not path.is_file():
        raise ValueError(f"--config={path}: no such file (looked in {path.absolute().parent})")
    try:
        loaded = OmegaConf.load(path)  # reads 1e-4 as a number, which PyYAML alone does not
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"--config={path}: is not a YAML file of settings ({' '.join(str(error).split())})") from error
    content = OmegaConf.to_container(loaded)
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(f"--config={path}: must contain a mapping of settings, such as optim: {{lr: 1e-4}}")
    if "defaults" in content:
        remedy = "write groups as keys, such as task: vqa, or save the file as configs/experiment/NAME.yaml"
        raise ValueError(f"--config={path}: defaults: is not read; {remedy}")
    groups = [f"{key}={value}" for key, value in content.items() if key in GROUPS and isinstance(value, str)]
    rest = {key: value for key, value in content.items() if not (key in GROUPS and isinstance(value, str))}
    return [*groups, *_flatten(rest)]


def _flatten(settings: Mapping[Any, object], prefix: str = "") -> Iterator[str]:
    for key, value in settings.items():
        if isinstance(value, dict) and value and all(isinstance(name, str) for name in value):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={format_override_value(value)}"


def format_override_value(value: object) -> str:
    """Return a value of a YAML file in the syntax of a command-line override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(format_override_value, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}: {format_override_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, str):
        return QuotedString(value, Quote.single).with_quotes()
    return str(value)
