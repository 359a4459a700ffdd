"""Text of --help: usage, config groups and the most common settings.

`--help all` lists all keys, `--help GROUP` the keys of a group, and `--help WORD` the keys whose
name or description contains a word. Only the examples are fixed text; keys, values and descriptions
are taken from the settings dataclasses. `--cfg diff` lists the settings that differ from the
defaults.
"""

import difflib
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from megatron_rl.cli.config_errors import reject_unknown_keys
from megatron_rl.config.field_docs import read_field_docs

CONFIG_MODULE = "megatron_rl.configs"
TRAIN_USAGE = """Reinforcement learning of vision-language agents: Megatron-Core policy, vLLM rollouts, no Ray.

    python launch/launch.py --nproc_per_node 2 launch/train.py experiment=numberline_grpo_cpu run.dir=runs/mine
    python launch/launch.py --nproc_per_node 2 launch/train.py experiment=numberline_grpo_cpu run.dir=runs/tp2 parallel.tp=2 optim.lr=3e-5
    python launch/train.py experiment=vqa_3b_1gpu model.path=3b 'task.data.train=[mine.jsonl]' 'task.data.eval=[held_out.jsonl]'

Every argument is GROUP=NAME, which selects a YAML file, or KEY=VALUE, which sets one setting; the last one wins. `--config mine.yaml` reads
arguments from a file, and configs/experiment/mine.yaml in the current directory is experiment=mine. These commands only print:

    python launch/train.py experiment=numberline_grpo_cpu --cfg job      # every value that a run would use
    python launch/train.py experiment=numberline_grpo_cpu --cfg diff     # the values that differ from the defaults
    python launch/train.py experiment=vqa_3b_1gpu model.path=3b run.dir=there plan.only=true    # its memory plan
    python launch/doctor.py experiment=numberline_grpo_cpu               # the problems that would prevent its start
    python launch/train.py --help optim                                  # the keys of a group; --help all: every key
    python launch/train.py --help warmup                                 # the keys whose name or description contains a word
"""
DOCTOR_USAGE = """Checks everything that a run needs before it is started, on the machine where it will run; accepts the run's arguments.

    python launch/doctor.py experiment=numberline_grpo_cpu
    python launch/doctor.py experiment=vqa_3b_1gpu model.path=3b 'task.data.train=[mine.jsonl]' 'task.data.eval=[held_out.jsonl]'

Prints a table of machine, model, task, data, judges, sandbox and W&B, and one line for each problem: `error: key=value: remedy`.
Exit code 0: a run can start; 1: it cannot.

    python launch/train.py --help       # names of experiments, and settings
"""
COMMON_SETTINGS = (
    "model.path", "run.dir", "run.steps", "run.eval_every", "checkpoint.every", "optim.lr", "batch.prompts_per_step", "batch.group_size",
    "batch.micro_batch_tokens", "task.max_turns", "task.max_new_tokens", "engine.max_model_len", "parallel.tp", "lora.rank",
    "wandb.mode",
)  # fmt: skip


def render_help(arguments: Sequence[str], *, is_doctor: bool) -> str:
    """Return the help text for the command-line arguments after --help.

    The argument `all`, the name of a group or any other word selects the keys to list. An argument
    key=value sets a value before the settings are printed.

    Raises:
        ValueError: No key or description contains the word.
    """
    if is_doctor:
        return DOCTOR_USAGE
    asked = [word for word in arguments if "=" not in word]
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        chosen = compose("train", overrides=[word for word in arguments if "=" in word])
        reject_unknown_keys(chosen)
        groups = list(_group_lines())
    keys = list(iterate_settings(chosen))
    if not asked:
        used = [f"  {key}={value}" for key, value, _ in keys if key in COMMON_SETTINGS]
        docs = [_shorten_doc(doc) for key, _, doc in keys if key in COMMON_SETTINGS]
        column = max(map(len, used)) + 2
        most = [f"{setting:{column}}{doc}" for setting, doc in zip(used, docs, strict=True)]
        return "\n".join([TRAIN_USAGE, *groups, "", "Common settings, with the other arguments applied:", *most])
    found = [(key, value, doc) for key, value, doc in keys if any(word == "all" or f"{key}.".startswith(f"{word}.") for word in asked)]
    if not found:
        found = [entry for entry in keys if all(word.lower() in f"{entry[0]} {entry[2]}".lower() for word in asked)]
    if not found:
        closest = difflib.get_close_matches(asked[0], map(str, chosen), n=1)
        hint = f"did you mean {closest[0]}?" if closest else f"use all, or one of {', '.join(map(str, chosen))}"
        raise ValueError(f"--help={' '.join(asked)}: no key or description contains it; {hint}")
    width = min(shutil.get_terminal_size().columns, 140)
    indent = {"width": width, "initial_indent": "    ", "subsequent_indent": "    "}
    return "\n".join(f"{key}={value}\n{textwrap.fill(' '.join(doc.split()), **indent)}" for key, value, doc in found)


def render_difference(overrides: Sequence[str]) -> str:
    """Return the settings that differ from those without arguments, one line for each.

    Example: `optim.lr=0.0002    # default 1e-06`.
    """
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        chosen, plain = compose("train", overrides=list(overrides)), compose("train")
    reject_unknown_keys(chosen)
    defaults = {key: value for key, value, _ in iterate_settings(plain)}
    changed = [(f"{key}={value}", defaults.get(key, "")) for key, value, _ in iterate_settings(chosen) if value != defaults.get(key)]
    width = max((len(setting) for setting, _ in changed), default=0)
    return "\n".join(f"{setting:{width}}    # default {default or 'none'}" for setting, default in changed)


def iterate_settings(chosen: DictConfig, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, value in command-line syntax, description) for every setting."""
    schema = OmegaConf.get_type(chosen)
    assert schema is not None, "the settings have a dataclass"
    docs = read_field_docs(schema)
    for name in map(str, chosen):
        value = "???" if OmegaConf.is_missing(chosen, name) else chosen[name]
        if isinstance(value, DictConfig) and is_dataclass(OmegaConf.get_type(value)):
            yield from iterate_settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, format_value(value), docs[name]


def format_value(value: Any) -> str:
    """Return a value in command-line syntax, such as `true`, `[a,b]` or `''`."""
    if isinstance(value, bool):
        return str(value).lower()
    if OmegaConf.is_list(value):
        return f"[{','.join(map(format_value, value))}]"
    return "''" if value == "" else str(value)


def _group_lines() -> Iterator[str]:
    """Yield one line for each config group, in the form `GROUP=NAME, NAME, ...`."""
    loader = GlobalHydra.instance().config_loader()
    for group in ("experiment", *(group for group in sorted(loader.list_groups("")) if group not in ("experiment", "hydra"))):
        yield textwrap.fill(f"{group}={', '.join(loader.get_group_options(group))}", width=140, subsequent_indent="  ")


def _shorten_doc(doc: str) -> str:
    return textwrap.shorten(doc, width=100, placeholder=" ...")
