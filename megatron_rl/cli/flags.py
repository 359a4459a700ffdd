"""Flags of the commands that take settings: Hydra's own, and `--cfg diff`."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from megatron_rl.cli.config_errors import FOREIGN_NAMES, setting_keys, split_override
from megatron_rl.config import Settings

DIFFERENCE = "diff"
"""Value of --cfg that prints the settings that differ from the defaults."""


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse flags and overrides in any order.

    Raises:
        ValueError: A flag is unknown.
    """
    parser = get_args_parser()
    parser.error = reject_flags
    shown = next(action for action in parser._actions if action.dest == "cfg")
    assert shown.choices is not None
    shown.choices = [*shown.choices, DIFFERENCE]
    return parser.parse_intermixed_args(arguments)


def choose_length(overrides: Sequence[str]) -> list[str]:
    """Return the overrides; run.steps also replaces the run.epochs of a recipe.

    Raises:
        ValueError: The overrides set both run.steps and run.epochs.
    """
    given = dict(map(split_override, overrides))
    if {"run.steps", "run.epochs"} <= given.keys():
        raise ValueError(f"run.epochs={given['run.epochs']}: run.steps={given['run.steps']} is given, too; remove one of them")
    return [*overrides, "run.epochs=0"] if "run.steps" in given else list(overrides)


def reject_flags(message: str) -> NoReturn:
    """Raise a ValueError that suggests key=value overrides in place of unknown flags."""
    words = [written for flag in message.partition("arguments: ")[2].split() if (written := flag_to_override(flag, sys.argv))]
    remedy = f"write {' '.join(words)}" if words else "see --help for the usage"
    raise ValueError(f"{message}; {remedy}")


def flag_to_override(flag: str, arguments: Sequence[str]) -> str:
    """Return the key=value override for a command-line flag, or "" if no setting matches.

    Flags of other trainers are also recognized. Example: --model.path 3b -> model.path=3b
    """
    name, equals, value = flag.lstrip("-").partition("=")
    leaf = name.replace("-", "_")
    key = leaf if leaf in setting_keys(Settings) else FOREIGN_NAMES.get(leaf, "")
    following = arguments[arguments.index(flag) + 1 :][:1] if flag in arguments and not equals else []
    value = value if equals else next((word for word in following if not word.startswith("-") and "=" not in word), "VALUE")
    return shlex.quote(f"{key}={value}") if key else ""
