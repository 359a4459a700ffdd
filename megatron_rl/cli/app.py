"""From the command line to settings and on to a run, with what a user's own file brings along. Hydra outside, plain dataclasses within."""

import errno
import os
import shlex
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from megatron_rl.cli.config_errors import ELSEWHERE, keys_of, refuse_strangers, retold
from megatron_rl.cli.help import text_of_help
from megatron_rl.config import Settings, require
from megatron_rl.distributed.world import SharedOSError, SharedValueError, World, read_world
from megatron_rl.errors import InfraError, PeerLost, RunFailed
from megatron_rl.io.bounded_files import printable
from megatron_rl.preflight.gpus import SHARED_MEMORY
from megatron_rl.rollout.task import require_task
from megatron_rl.run.shutdown import INTERRUPTED, die_with_parent
from megatron_rl.tasks.task_options import OPTIONS

CONFIGS = "pkg://megatron_rl.configs"
QUIET_S = 20.0
"""What every rank sees is told by the main one: the others wait this long before they speak or end, and torchrun ends them sooner."""
FULL_BYTES = 1 << 20
"""A disk is full where less is free."""
STOPPED = os.EX_TEMPFAIL
"""Exit code of a run that was asked to stop and did: the same command goes on."""

ConfigStore.instance().store(name="schema", node=Settings)
for name, options in OPTIONS.items():  # the yaml of such a task takes them by its defaults
    ConfigStore.instance().store(group="task/options", name=name, node=options)


def beside_the_file() -> Path:
    return Path(sys.argv[0]).resolve().parent / "configs"


class BesideTheFile(SearchPathPlugin):
    """The folder configs/ beside the file that was started, where there is one, is searched before ours."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if beside_the_file().is_dir():
            search_path.prepend("beside-the-file", f"file://{beside_the_file()}")


Plugins.instance().register(BesideTheFile)


def cli(
    *, tasks: Mapping[str, type] | None = None, rewards: Mapping[str, Callable[..., object]] | None = None,
    algorithms: Mapping[str, object] | None = None,
) -> None:  # fmt: skip
    """Do what the command line says; the first word may be `doctor`, which looks at what the run needs and does not start it, `serve`,
    which starts nothing but services of it, `engine`, which prints the command of a server for its engine.urls, `evaluate`, which plays its
    examples and trains nothing, or `rescore`, which scores what was recorded.

    A user's own tasks, rewards and algorithms are chosen by their names here, as those that ship are: {"mine": MyTask} by task=mine,
    {"short": short} by task.reward=short, {"mine": Algorithm(...)} by algo.name=mine (docs/extend.md).
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun or launch/spawn.py, and by no shell that may go home first
        die_with_parent()
    word = sys.argv.pop(1) if sys.argv[1:2] in (["doctor"], ["serve"], ["engine"], ["evaluate"], ["rescore"]) else "train"

    def act(settings: Settings) -> None:
        try:
            from megatron_rl.entrypoints.train import run  # brings torch and Megatron
            from megatron_rl.registry import Plugins
        except ImportError as error:
            raise ValueError(of_transformer_engine(error)) from error
        from megatron_rl.run.status import is_finished
        from megatron_rl.services.service_job import serve

        own = Plugins(tasks=tasks or {}, rewards=rewards or {}, algorithms=algorithms or {})
        if word == "doctor":
            from megatron_rl.preflight.doctor import examine_and_show

            sys.exit(examine_and_show(settings, own))
        if word == "serve":
            if not serve(settings, is_over=lambda: is_finished(Path(settings.run.dir))):
                sys.exit(STOPPED)
            return
        if word == "engine":
            from megatron_rl.rollout.vllm.server_api import command_of

            print(command_of(settings))
            return
        if word == "evaluate":
            from megatron_rl.entrypoints.evaluate import evaluate_alone

            end_with(evaluate_alone(settings, own) is not None)
            return
        if word == "rescore":
            from megatron_rl.entrypoints.rescore import rescore

            end_with(rescore(settings, own) is not None)
            return
        result = run(settings, own)
        end_with(result is None or result.is_finished)

    read_and(act, tasks or {}, examines=word == "doctor")


def end_with(is_finished: bool) -> None:
    """Where it was stopped, exit with the code that says so: every rank, the main one first."""
    if not is_finished:
        if not read_world().is_main:
            time.sleep(QUIET_S)
        sys.exit(STOPPED)


def of_transformer_engine(error: ImportError) -> str:
    """megatron-core 0.16.1 does not load beside a Transformer Engine that does not load itself, or lacks a module which Megatron looks for.
    An error of anything else is raised."""
    inside = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not any(name.startswith("transformer_engine") for name in (*inside, error.name or "")):
        raise error
    remedy = "bash launch/install_te.sh installs the version that fits; without it: pip uninstall transformer-engine"
    return f"transformer_engine: megatron-core does not load beside the one that is installed ({error}); {remedy}"


def offer(tasks: Mapping[str, type]) -> None:
    """Let task=NAME choose one of these, with its options; a yaml of that name beside the user's file does so itself."""
    for name, task in tasks.items():
        require_task(name, task)
        if not (beside_the_file() / "task" / f"{name}.yaml").exists():
            ConfigStore.instance().store(group="task", name=name, node={"name": name, "options": task.Options})


def read_and(act: Callable[[Settings], None], tasks: Mapping[str, type], *, examines: bool) -> None:
    """Let hydra read the command line, and act on the settings; a user's mistake ends as one line, never as a traceback."""
    world = read_world()

    @hydra.main(version_base="1.3", config_path=CONFIGS, config_name="train")
    def main(chosen: DictConfig) -> None:
        warnings.filterwarnings("ignore", module="megatron")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # megatron-core 0.16.1 calls collectives by older names
        try:
            settings = resolve(chosen, tasks)
        except ValueError as error:
            end(str(error), world, seen_by_all=True)
        try:
            leave_out_wandb(settings.wandb.mode == "disabled")
            act(settings)
        except PeerLost:
            sys.exit(1)
        except (ValueError, OSError, RunFailed, InfraError) as error:
            end_with_error(error, world, is_dry=settings.run.dry)
        except KeyboardInterrupt:
            print("error: interrupted; the checkpoints that were complete stay, and the same command goes on", file=sys.stderr, flush=True)
            sys.exit(INTERRUPTED)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra 1.3.2 raises what it would print, _internal/utils.py: run_and_report
    try:
        flags = get_args_parser()
        flags.error = refuse_flags
        given = flags.parse_intermixed_args()
        require(not given.multirun, "--multirun", True, "all would run in one run.dir; start one command for each")
        offer(tasks)
        if not given.help:
            flags.parse_args()  # as hydra will: it wants all of key=value together
            main()
        elif world.is_main:
            print(text_of_help(given.overrides, examines=examines))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        end(retold(error, sys.argv[1:]), world, seen_by_all=True)
    except ValueError as error:  # of a flag
        end(str(error), world, seen_by_all=True)


def leave_out_wandb(is_disabled: bool) -> None:
    """Let no library import a wandb that is not asked for, as megatron-core 0.16.1 does: killed, it leaves folders in /tmp."""
    loaded = sys.modules.pop("wandb", None)
    if is_disabled or loaded is not None:
        sys.modules["wandb"] = loaded


def end_with_error(error: Exception, world: World, *, is_dry: bool = False) -> NoReturn:
    """End with one line; the main rank alone prints an error that every rank has raised (world.raise_on_all_ranks, and in a dry run
    any)."""
    end(with_full_disks(str(error)), world, seen_by_all=is_dry or isinstance(error, SharedValueError | SharedOSError))


def with_full_disks(line: str) -> str:
    """Say where there is no room, where the system's own line does not: a lock or a segment of shared memory has no file's name."""
    if line != str(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
        return line
    full = [str(place) for place in (SHARED_MEMORY, Path(tempfile.gettempdir())) if shutil.disk_usage(place).free < FULL_BYTES]
    return f"{' and '.join(full) or 'a disk'}: {line}; free some, or start a container with a larger --shm-size"


def end(line: str, world: World, *, seen_by_all: bool = False) -> NoReturn:
    """Exit code 1 behind one line; what certainly every rank has met is told by the main one alone."""
    if not world.is_main:
        time.sleep(QUIET_S)
    if world.is_main or not seen_by_all:
        print(f"error: {printable(line)}", file=sys.stderr, flush=True)
    sys.exit(1)


def refuse_flags(message: str) -> NoReturn:
    words = [written for flag in message.partition("arguments: ")[2].split() if (written := as_setting(flag, sys.argv))]
    remedy = f"write {' '.join(words)}" if words else "--help tells how to start"
    raise ValueError(f"{message}; {remedy}")


def as_setting(flag: str, given: Sequence[str]) -> str:
    """Return a flag as a word of ours; '' where it is none of ours nor of other trainers. Example: --model.path 3b -> model.path=3b"""
    name, equals, value = flag.lstrip("-").partition("=")
    leaf = name.replace("-", "_")
    key = leaf if leaf in keys_of(Settings) else ELSEWHERE.get(leaf, "")
    following = given[given.index(flag) + 1 :][:1] if flag in given and not equals else []
    value = value if equals else next((word for word in following if not word.startswith("-") and "=" not in word), "VALUE")
    return shlex.quote(f"{key}={value}") if key else ""


def resolve(chosen: DictConfig, tasks: Mapping[str, type] = MappingProxyType({})) -> Settings:
    """The plain dataclasses, checked. ValueError: a value is wrong or lacking, or a key was added (+key=value) that no dataclass has.

    What a yaml says of task.options is held to the dataclass that the user's own task has for it.
    """
    own = tasks.get(OmegaConf.select(chosen, "task.name", default=""))
    try:
        if own is not None and own.Options is not None:
            given = OmegaConf.select(chosen, "task.options")
            OmegaConf.update(chosen, "task.options", OmegaConf.merge(OmegaConf.structured(own.Options), given or {}), merge=False)
        refuse_strangers(chosen)
        return OmegaConf.to_object(chosen)
    except MissingMandatoryValue as error:
        raise ValueError(f"{error.full_key}=???: has no default; give it on the command line") from error
    except OmegaConfBaseException as error:
        raise ValueError(retold(error, sys.argv[1:])) from error
