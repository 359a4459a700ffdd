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
EVALUATE_USAGE = """Evaluates a checkpoint on a task's examples, without training; accepts a run's arguments.

    python launch/evaluate.py task=number_line model.path=runs/quickstart/grpo/final \\
        run.dir=runs/evaluations/quickstart
    python launch/evaluate.py task=number_line model.path=3b run.dir=runs/evaluations/3b \\
        evaluation.samples=8 evaluation.temperature=1
    python launch/evaluate.py task=number_line model.path=NAME run.dir=runs/evaluations/far \\
        'evaluation.urls=[http://127.0.0.1:8000/v1]'

Writes evaluation.json (scores and their conditions), examples.jsonl (one line per example) and all
episodes to run.dir. The same command resumes an evaluation that was stopped or killed.
launch/compare.py compares evaluations.

    python launch/evaluate.py --help evaluation    # its settings
    python launch/train.py --help                  # names of experiments, and all settings
"""
RESCORE_USAGE = """Recomputes the rewards of recorded rollouts; accepts a run's arguments.

    python launch/rescore.py experiment=numberline_grpo_cpu run.dir=runs/scored \\
        rollouts.replay_from=runs/all/rollouts
    python launch/train.py experiment=numberline_grpo_cpu run.dir=runs/again run.mode=replay \\
        run.eval_every=0 rollouts.replay_from=runs/scored/rollouts

rollouts.replay_from is the rollouts folder of a run with rollouts.save=all. The same command
resumes a rescoring that was stopped or killed.

    python launch/train.py --help       # names of experiments, and settings
"""
SERVE_USAGE = """Serves the model of a run as an endpoint of OpenAI's chat completions:

    python launch/serve.py RUN                  # run.dir of a run, or one of its checkpoints
    python launch/serve.py RUN --help           # its options and examples

With settings in place of a run, starts only the external services of a run, in a job of their own:

    python launch/serve.py experiment=vqa_3b_1gpu model.path=3b \\
        'services.judge={kind: vllm, model: 7b, external: true}'

Their addresses are written to run.dir, where a run with the same arguments waits for them. Exit
code 0: the run is finished; 75: a signal stopped the services.

    python launch/train.py --help services      # their settings
"""
SERVER_COMMAND_USAGE = """Prints the command that starts a vLLM server for each URL in engine.urls; accepts a run's arguments.

    python launch/server_command.py experiment=vqa_3b_1gpu model.path=3b engine.mode=server \\
        engine.token_file=FILE 'engine.urls=[http://node2:8000]'

Run each command on the node of its URL. The server accepts only requests with the token in
engine.token_file.

    python launch/train.py --help engine        # the settings of engines
"""
USAGES = {
    "train": TRAIN_USAGE, "doctor": DOCTOR_USAGE, "evaluate": EVALUATE_USAGE, "rescore": RESCORE_USAGE, "serve": SERVE_USAGE,
    "server-command": SERVER_COMMAND_USAGE,
}  # fmt: skip
"""Help text of each command that takes settings. That of train is followed by lists of settings."""
COMMON_SETTINGS = (
    "model.path", "run.dir", "run.steps", "run.eval_every", "checkpoint.every", "optim.lr", "batch.prompts_per_step", "batch.group_size",
    "batch.micro_batch_tokens", "task.max_turns", "task.max_new_tokens", "engine.max_model_len", "parallel.tp", "lora.rank",
    "wandb.mode",
)  # fmt: skip


def render_help(arguments: Sequence[str], *, command: str) -> str:
    """Return the help text of a command of USAGES for the command-line arguments after --help.

    The argument `all`, the name of a group or any other word selects the keys to list. An argument
    key=value sets a value before the settings are printed.

    Raises:
        ValueError: No key or description contains the word.
    """
    asked = [word for word in arguments if "=" not in word]
    if command != "train" and not asked:
        return USAGES[command]
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
    if OmegaConf.is_dict(value):
        return f"{{{','.join(f'{name}:{format_value(each)}' for name, each in value.items())}}}"
    return "''" if value == "" else str(value)


def _group_lines() -> Iterator[str]:
    """Yield one line for each config group, in the form `GROUP=NAME, NAME, ...`."""
    loader = GlobalHydra.instance().config_loader()
    for group in ("experiment", *(group for group in sorted(loader.list_groups("")) if group not in ("experiment", "hydra"))):
        yield textwrap.fill(f"{group}={', '.join(loader.get_group_options(group))}", width=140, subsequent_indent="  ")


def _shorten_doc(doc: str) -> str:
    return textwrap.shorten(doc, width=100, placeholder=" ...")
