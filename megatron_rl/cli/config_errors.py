"""Turns Hydra and OmegaConf errors into one-line messages of the form `key=value: remedy`.

The code depends on internals of hydra 1.3.2 (core/default_element.py,
_internal/config_loader_impl.py) and omegaconf 2.3.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from difflib import SequenceMatcher, get_close_matches
from importlib.resources import files
from typing import get_args, get_origin, get_type_hints

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException, SearchPathException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError
from yaml import MarkedYAMLError, YAMLError

from megatron_rl import configs
from megatron_rl.cli.override_quoting import CLOSING_BRACKETS, is_enclosed, quote_override, setting_type
from megatron_rl.config import Settings

FOREIGN_NAMES = {
    "learning_rate": "optim.lr",
    "max_grad_norm": "optim.clip_grad",
    "num_generations": "batch.group_size",
    "rollout_batch_size": "batch.prompts_per_step",
    "train_batch_size": "batch.prompts_per_step",
    "beta": "algo.kl_coef",
    "kl_loss_coef": "algo.kl_coef",
    "epsilon": "algo.clip_ratio_low",
    "clip_ratio": "algo.clip_ratio_low",
    "max_steps": "run.steps",
    "num_train_epochs": "run.epochs",
    "total_epochs": "run.epochs",
    "save_steps": "checkpoint.every",
    "output_dir": "run.dir",
    "model_name_or_path": "model.path",
    "max_completion_length": "task.max_new_tokens",
    "max_response_length": "task.max_new_tokens",
    "lora_rank": "lora.rank",
    "report_to": "wandb.mode",
}
"""Maps names of settings in TRL, verl and ms-swift to the equivalent settings of this trainer."""
TYPE_DESCRIPTIONS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
MIN_SIMILARITY = 0.6
"""Minimum similarity (ratio of difflib.SequenceMatcher) at which a known name is suggested."""


def format_error(error: HydraException | OmegaConfBaseException | YAMLError, overrides: Sequence[str]) -> str:
    """Return the one-line message for an error raised while composing the settings.

    `overrides` are the command-line arguments. URLs that may contain credentials are masked in the
    message. config.checks.require_address rejects such URLs, but only after the settings have been
    composed.
    """
    return re.sub(r"(?<=://)\S*[@?#]\S*?(?=:?(?:\s|$))", "***", error_line(error, overrides))


def error_line(error: HydraException | OmegaConfBaseException | YAMLError, overrides: Sequence[str]) -> str:
    """Return the one-line message for an error, without masking addresses."""
    if isinstance(error, OverrideParseException):
        return malformed_override_line(error.override, overrides)
    if isinstance(error, MissingConfigException):
        return missing_config_line(error)
    if isinstance(error, ConfigCompositionException):
        return composition_error_line(error, overrides)
    if isinstance(error, OmegaConfBaseException):
        return f"{format_typed(str(error.full_key), dict(map(split_override, overrides)))}: {first_line(error)}"
    if isinstance(error, SearchPathException):
        return f"--config-dir: {first_line(error)}"
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem_mark.name}: line {error.problem_mark.line + 1} is not valid YAML: {error.problem}"
    return first_line(error)


def composition_error_line(error: ConfigCompositionException, overrides: Sequence[str]) -> str:
    """Return the message for an invalid key or value, from the command line or a YAML file.

    If the error is in a YAML file, the message names the file.
    """
    cause = error.__cause__ or error.__context__
    place = re.match(r"In '(.+?)': \w+ raised", str(error))
    where = f"{place[1]}.yaml: " if place else ""
    typed = {} if place else dict(map(split_override, overrides))
    entry = next((key for key in typed if isinstance(cause, OmegaConfBaseException) and _is_in_entry(cause, key)), "")
    if isinstance(cause, OmegaConfBaseException) and entry:
        return f"{format_typed(entry, typed)}: {describe_entry_error(cause, entry)}"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        key = next((key for key in typed if f"'{key}'" in str(error)), str(cause.full_key))
        if get_origin(cause.ref_type) is dict:
            return f"{where}{format_typed(key, typed)}: a new name is added with a plus sign; write +{cause.full_key}=VALUE"
        return f"{where}{unknown_key_line(key, format_typed(key, typed))}"
    if isinstance(cause, ValidationError):
        inner = next((key for key in typed if key.startswith(f"{cause.full_key}.")), "")
        if inner:
            return unknown_key_line(inner, format_typed(inner, typed))
        value = typed.get(str(cause.full_key), cause.value)
        return f"{where}{cause.full_key}={value}: {describe_expected_value(cause, value)}"
    removed = re.search(r"override ~(\S+)|delete from config. '(.+)' does not", str(error))
    if removed:
        key = removed[1] or removed[2]
        return (
            f"~{key}: a setting cannot be removed; set {key}=VALUE" if key in setting_keys(Settings) else unknown_key_line(key, f"~{key}")
        )
    ambiguous = re.match(r"Ambiguous value for argument '(.+?)=(.+)'", str(error))
    if ambiguous:
        return multiple_values_line(*ambiguous.groups())
    return first_line(error)


def describe_expected_value(error: ValidationError, value: object) -> str:
    """Describe the type that a setting expects, for the message that rejects `value`."""
    is_entry = get_origin(error.ref_type) is dict
    kind = get_args(error.ref_type)[1] if is_entry else get_type_hints(error.object_type)[error.key]
    if is_dataclass(kind):
        return f"is a group of settings; set one of {', '.join(f'{error.full_key}.{field.name}' for field in fields(kind))}"
    if get_origin(kind) is list:
        return f"expects a list; write {quote_override(str(error.full_key), str(value))}"
    if get_origin(kind) is dict:
        return f"expects names with values; write +{error.full_key}.NAME={value}"
    return f"expects {TYPE_DESCRIPTIONS[kind]}"


def describe_entry_error(error: OmegaConfBaseException, setting: str) -> str:
    """Describe an error in an entry of a list of groups, such as task.tools.mcp."""
    group = get_args(setting_type(setting))[0]
    names = ", ".join(field.name for field in fields(group))
    if error.object_type is not group:
        return f"contains an entry that is not a group {{KEY:VALUE,...}} of the keys {names}"
    kind = get_type_hints(group).get(str(error.key))
    if kind is None:
        return f"{error.key} is not one of the keys {names}"
    expected = f"a list; write {error.key}:[...]" if get_origin(kind) is list else TYPE_DESCRIPTIONS[kind]
    return f"{error.key} expects {expected}"


def _is_in_entry(error: OmegaConfBaseException, setting: str) -> bool:
    """Return True if a setting is a list of groups, and the error is in one of its entries."""
    kind = setting_type(setting)
    group = get_args(kind)[0] if get_origin(kind) is list else None
    return is_dataclass(group) and (error.object_type is group or str(error.full_key).startswith(f"{setting}["))


def missing_config_line(error: MissingConfigException) -> str:
    """Return the message for a YAML file that does not exist.

    The file was requested by an override such as experiment=NAME or --config-name=NAME, or by
    another YAML file.
    """
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    if not group:
        return f"--config-name={name}: no such YAML file; train is built in, your own files belong in a folder configs/ next to your script"
    near = get_close_matches(name, error.options or [], n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{group}={name}: no such {group}; {hint}--help lists all"


def missing_task_line() -> str:
    """Return the error message for settings without a task."""
    known = sorted(file.name.removesuffix(".yaml") for file in (files(configs) / "task").iterdir() if file.name.endswith(".yaml"))
    return f"task=???: has no default; choose one of {', '.join(known)}, or a recipe, e.g. experiment=numberline_grpo_cpu (see --help)"


def multiple_values_line(key: str, value: str) -> str:
    """Return the message for a value that contains commas but is not in brackets."""
    kind = setting_type(key)
    if kind in TYPE_DESCRIPTIONS and kind is not str:
        return f"{key}={value}: expects {TYPE_DESCRIPTIONS[kind]}"
    if get_origin(kind) is list:
        return f"{key}={value}: contains a comma; write {quote_override(key, value)}; put an entry that contains a comma into double quotes"
    return f"{key}={value}: contains a comma; write '{key}=[{value}]' for a list, or '{key}=\"{value}\"' for a single string"


def malformed_override_line(word: str, overrides: Sequence[str] = ()) -> str:
    """Return the message for an override that Hydra's grammar rejects.

    `overrides` are all command-line arguments; they are needed because the shell may have split one
    override into several.
    """
    key, equals, value = word.partition("=")
    if not equals:
        before = overrides[overrides.index(word) - 1] if word in overrides[1:] else ""
        example = f"{shlex.quote(f'{before} {word}')}, if it belongs to the argument before it" if "=" in before else "'key=[a, b]'"
        return f"{word}: is not key=value; put a value with blanks, brackets or quotes into shell quotes: {example}"
    opener = value[:1]
    if opener in CLOSING_BRACKETS and not is_enclosed(value, opener):
        whole = rejoin_split_value(word, overrides)
        example = quote_override(key, whole) if whole else f"'{key}=[a, b]'"
        return (
            f"{word}: the brackets {opener}{CLOSING_BRACKETS[opener]} are not closed; put the whole argument into shell quotes: {example}"
        )
    if opener in ("'", '"') and (len(value) == 1 or value[-1] != opener):
        return f"{word}: the quotes are not closed; put the whole argument into shell quotes: '{key}=[a, b]'"
    kind = setting_type(key)
    if kind in TYPE_DESCRIPTIONS and kind is not str:
        return f"{word}: expects {TYPE_DESCRIPTIONS[kind]}"
    return f"{word}: contains a special character; quote the value, and quote it again for the shell: {quote_override(key, value)}"


def rejoin_split_value(word: str, overrides: Sequence[str]) -> str:
    """Rejoin the value of an override that the shell split at spaces, up to the closing bracket.

    Return an empty string if the bracket is never closed.
    """
    value, opener = word.partition("=")[2], word.partition("=")[2][:1]
    for following in overrides[overrides.index(word) + 1 :] if word in overrides else ():
        value = f"{value} {following}"
        if is_enclosed(value, opener):
            return value
    return ""


def reject_unknown_keys(chosen: DictConfig, prefix: str = "") -> None:
    """Raise ValueError if `chosen` contains a key that no settings dataclass defines.

    Hydra accepts such a key if it was added with +key=value.
    """
    schema = OmegaConf.get_type(chosen)
    assert schema is not None, "the settings have a dataclass"
    known = {field.name for field in fields(schema)}
    for name in map(str, chosen):
        key, value = prefix + name, "???" if OmegaConf.is_missing(chosen, name) else chosen[name]
        if name not in known:
            raise ValueError(unknown_key_line(key, f"{key}={value}"))
        if isinstance(value, DictConfig) and is_dataclass(OmegaConf.get_type(value)):
            reject_unknown_keys(value, f"{key}.")


def unknown_key_line(key: str, given: str) -> str:
    """Return the message for an unknown key, with the most similar known key as a suggestion."""
    near = closest_key(key)
    return f"{given}: no such key; {f'did you mean {near}?' if near else '--help all lists all keys'}"


def closest_key(key: str) -> str:
    """Return the setting or config group that the user probably meant, or an empty string.

    Names used by other trainers are tried first, then the known key with the most similar last
    component.
    """
    group, _, leaf = key.rpartition(".")
    folders = [] if group else [each.name for each in files(configs).iterdir() if each.is_dir()]
    known = [*setting_keys(Settings), *folders]
    if leaf in FOREIGN_NAMES or group in known:
        return FOREIGN_NAMES.get(leaf, group)
    likeness, _, best = max((_similarity(leaf, each.rpartition(".")[2]), _similarity(key, each), each) for each in known)
    return best if likeness >= MIN_SIMILARITY else ""


def setting_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of all settings, excluding the groups themselves."""
    for field in fields(schema):
        if isinstance(field.type, type) and is_dataclass(field.type):
            yield from setting_keys(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def split_override(word: str) -> tuple[str, str]:
    """Split an override into key and value. Example: `++algo.name=grpo` -> algo.name, grpo."""
    key, _, value = word.lstrip("+~").partition("=")
    return key, value


def format_typed(key: str, typed: dict[str, str]) -> str:
    """Return `key=value` as the user typed it, or only the key if the user typed no value."""
    return f"{key}={typed[key]}" if key in typed else key


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).partition("\n")[0]


def _similarity(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
