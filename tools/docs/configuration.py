"""Renders the configuration reference from the settings dataclasses in megatron_rl/config."""

import dataclasses
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, get_args, get_origin

from omegaconf import MISSING as REQUIRED

from megatron_rl.config import Settings
from megatron_rl.config.field_docs import read_field_docs
from megatron_rl.config.task_options import TASK_OPTIONS

PAGE = "configuration.md"
HEADER = """# Configuration reference

This page lists every setting with its type, its default and its meaning. It is generated from the
dataclasses in `megatron_rl/config`, like the output of `python launch/train.py --help all`.

Write a setting as `key=value` on the command line. The defaults are those of the dataclasses. A
preset, such as `algo=dapo`, or a recipe, such as `experiment=vqa_3b_1gpu`, may set other values;
`--cfg job` prints the values that a run would use. *required* means that the setting has no
default.

A list is written in brackets and quoted for the shell: `'task.data.train=[a.jsonl,b.jsonl]'`.

"""


@dataclass(slots=True, frozen=True)
class Setting:
    """One setting, as it is documented."""

    key: str
    type_name: str
    default: str
    meaning: str


@dataclass(slots=True)
class Group:
    """Settings with a common prefix."""

    name: str
    meaning: str
    settings: list[Setting] = field(default_factory=list)


def list_settings(schema: type, prefix: str = "") -> Iterator[Setting]:
    """Yield all settings of a dataclass, including those of nested dataclasses."""
    docs = read_field_docs(schema)
    for each in fields(schema):
        if is_dataclass(each.type):
            yield from list_settings(each.type, f"{prefix}{each.name}.")
        else:
            yield Setting(prefix + each.name, format_type(each.type), format_default(each), docs[each.name])


def list_groups() -> list[Group]:
    """Return all groups of settings in the order of `Settings`, then the options of each task."""
    docs, groups = read_field_docs(Settings), [Group("stage", "")]
    for each in fields(Settings):
        if is_dataclass(each.type):
            found = list(list_settings(each.type, f"{each.name}."))
            groups.append(Group(each.name, docs[each.name], found))
    groups[0].settings = [next(setting for setting in list_settings(Settings) if setting.key == "stage")]
    for name, schema in TASK_OPTIONS.items():
        found = list(list_settings(schema, "task.options."))
        groups.append(Group(f"task.options of task={name}", " ".join((schema.__doc__ or "").split()), found))
    return groups


def format_type(hint: Any) -> str:
    """Return a type as text, such as `int`, `list[str]` or `dict[str, float]`."""
    if hint is Any:
        return "any"
    if get_origin(hint) in (list, dict):
        return f"{get_origin(hint).__name__}[{', '.join(map(format_type, get_args(hint)))}]"
    if isinstance(hint, types.UnionType):
        return " | ".join(map(format_type, get_args(hint)))
    return getattr(hint, "__name__", str(hint))


def format_default(each: dataclasses.Field[Any]) -> str:
    """Return the default of a field in command-line syntax, or `required`."""
    value = each.default if each.default_factory is MISSING else each.default_factory()
    if value is MISSING or value == REQUIRED:
        return "required"
    return format_literal(value)


def format_literal(value: Any) -> str:
    """Return a value in command-line syntax, such as `true`, `[a,b]` or `''`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(format_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}: {format_literal(each)}' for key, each in value.items())}}}"
    return "''" if value == "" else "null" if value is None else str(value)


def escape(text: str) -> str:
    """Return plain text as Markdown that shows the same characters."""
    for symbol in "\\`*_{}[]<>#|":
        text = text.replace(symbol, f"\\{symbol}" if symbol not in "<>" else {"<": "&lt;", ">": "&gt;"}[symbol])
    return text


def mark_keys(text: str, keys: Iterable[str]) -> str:
    """Return plain text as Markdown, with the names of settings as code."""
    names = "|".join(re.escape(key) for key in sorted(keys, key=len, reverse=True) if "." in key)
    parts = re.split(rf"(?<![\w.])((?:{names})(?:=[\w.-]+\b)?)(?!\w)", text)
    return "".join(f"`{part}`" if index % 2 else escape(part) for index, part in enumerate(parts))


def render_configuration() -> str:
    """Return the Markdown of the configuration reference."""
    lines, keys = [HEADER], [each.key for each in list_settings(Settings)]
    seen: set[str] = set()
    for group in list_groups():
        lines.append(f"## {group.name}\n\n{escape(group.meaning)}\n")
        for each in group.settings:
            anchor = "" if each.key in (*seen, group.name) else f'<a id="{each.key}"></a>'
            seen.add(each.key)
            default = "*required*" if each.default == "required" else f"default `{each.default}`"
            lines.append(f"{anchor}`{each.key}` · {escape(each.type_name)} · {default}\n:   {mark_keys(each.meaning, keys)}\n")
    return "\n".join(lines)
