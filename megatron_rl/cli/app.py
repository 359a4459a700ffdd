"""Command-line application: composes the settings with Hydra and runs a command with them.

A user script can add tasks, rewards and algorithms. Commands receive the settings as plain
dataclasses and do not use Hydra.
"""

import errno
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, cast

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from megatron_rl.cli.config_errors import format_error, missing_task_line, reject_unknown_keys
from megatron_rl.cli.config_file import expand_config_flags
from megatron_rl.cli.flags import DIFFERENCE, choose_length, parse_flags
from megatron_rl.cli.help import USAGES, render_difference, render_help
from megatron_rl.cli.serve import main as serve_main
from megatron_rl.cli.serve import names_run
from megatron_rl.compat.startup import ignore_library_warnings, paused_collector
from megatron_rl.config import Settings, require
from megatron_rl.config.task_options import TASK_OPTIONS
from megatron_rl.distributed.world import SharedOSError, SharedValueError, World, read_world
from megatron_rl.errors import InfraError, PeerLost, RunFailed
from megatron_rl.io.bounded_files import to_printable
from megatron_rl.io.pipes import exit_with_reader
from megatron_rl.models.model_folder import resolve_hub_name
from megatron_rl.preflight.gpus import SHARED_MEMORY
from megatron_rl.rollout.task import require_task
from megatron_rl.run.shutdown import EXIT_INTERRUPTED, die_with_parent

CONFIG_SEARCH_PATH = "pkg://megatron_rl.configs"
NON_MAIN_DELAY_S = 20.0
"""Delay in seconds before ranks other than the main rank print an error or exit. The main rank
prints and exits first, and torchrun ends the other ranks during the delay.
"""
MIN_FREE_BYTES = 1 << 20
"""Free disk space in bytes below which a disk counts as full."""
STOPPED_EXIT_CODE = os.EX_TEMPFAIL
"""Exit code of a run that stopped on request and can be resumed with the same command."""

ConfigStore.instance().store(name="schema", node=Settings)
for name, options in TASK_OPTIONS.items():  # default options in the task's YAML file
    ConfigStore.instance().store(group="task/options", name=name, node=options)


def relative_config_folder() -> Path | None:
    """Return the directory configs/ next to the script that was started; None without either.

    With `python -c` and in notebooks, no script was started.
    """
    script = Path(sys.argv[0])
    folder = script.resolve().parent / "configs"
    return folder if script.is_file() and folder.is_dir() else None


class RelativeConfigPath(SearchPathPlugin):
    """Hydra plugin that adds the user's own folders of YAML files.

    configs/ next to the user's script is searched before the built-in files, and configs/ in the
    current directory after them.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folders that exist to Hydra's search path."""
        if folder := relative_config_folder():
            search_path.prepend("beside-the-file", f"file://{folder}")
        if Path("configs").is_dir():
            search_path.append("current-directory", f"file://{Path('configs').absolute()}")


Plugins.instance().register(RelativeConfigPath)


def cli(
    *, tasks: Mapping[str, type] | None = None, rewards: Mapping[str, Callable[..., object]] | None = None,
    algorithms: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Run the command given by this process's command-line arguments.

    Args:
        tasks: User-defined tasks, keyed by name. With {"mine": MyTask}, task=mine selects the task.
        rewards: User-defined reward functions, keyed by name. With {"short": short},
            task.reward=short selects the function.
        algorithms: User-defined algorithms, keyed by name. With {"mine": Algorithm(...)},
            algo.name=mine selects the algorithm (docs/extend.md).

    The first argument may be one of these commands; without a command, a training run starts.

    - train: start a training run.
    - doctor: check everything that a run needs, without starting the run.
    - serve: serve the model of a run, or start only the external services of a run.
    - server-command: print the command that starts an inference server for engine.urls.
    - evaluate: run the task's examples without training.
    - rescore: recompute the rewards of recorded rollouts.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun or launch/launch.py: exit together with the launcher
        die_with_parent()
    word = sys.argv.pop(1) if sys.argv[1:2] and sys.argv[1] in USAGES else "train"
    if word == "serve" and names_run(sys.argv[1:]):
        sys.exit(serve_main(sys.argv[1:]))

    def act(settings: Settings) -> None:
        try:
            with paused_collector():
                from megatron_rl.entrypoints.train import run  # imports torch and Megatron
                from megatron_rl.registry import Plugins
        except ImportError as error:
            raise ValueError(transformer_engine_error(error)) from error
        from megatron_rl.run.status import is_finished
        from megatron_rl.services.service_job import serve_external_services

        plugins = Plugins(tasks=tasks or {}, rewards=rewards or {}, algorithms=algorithms or {})
        if word == "doctor":
            from megatron_rl.preflight.doctor import run_doctor

            sys.exit(run_doctor(settings, plugins))
        if word == "serve":
            if not serve_external_services(settings, is_run_finished=lambda: is_finished(Path(settings.run.dir))):
                sys.exit(STOPPED_EXIT_CODE)
            return
        if word == "server-command":
            from megatron_rl.rollout.vllm.server_api import launch_command

            print(launch_command(settings))
            return
        if word == "evaluate":
            from megatron_rl.entrypoints.evaluate import run_evaluation

            exit_with(run_evaluation(settings, plugins) is not None)
            return
        if word == "rescore":
            from megatron_rl.entrypoints.rescore import rescore_run

            exit_with(rescore_run(settings, plugins) is not None)
            return
        result = run(settings, plugins)
        exit_with(result is None or result.is_finished)

    load_and_run(act, tasks or {}, command=word)


def exit_with(is_finished: bool) -> None:
    """Exit with STOPPED_EXIT_CODE if the run is not finished.

    The main rank exits before the other ranks.
    """
    if not is_finished:
        if not read_world().is_main:
            time.sleep(NON_MAIN_DELAY_S)
        sys.exit(STOPPED_EXIT_CODE)


def transformer_engine_error(error: ImportError) -> str:
    """Return the error message for an installed Transformer Engine that cannot be imported.

    megatron-core 0.16.1 cannot be imported if Transformer Engine is broken or lacks a module that
    Megatron needs. Import errors from other packages are re-raised.
    """
    inside = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not any(name.startswith("transformer_engine") for name in (*inside, error.name or "")):
        raise error
    remedy = "bash launch/install_te.sh installs a compatible version; to run without it: pip uninstall transformer-engine"
    return f"transformer_engine: megatron-core cannot be imported with the installed version ({error}); {remedy}"


def register_tasks(tasks: Mapping[str, type]) -> None:
    """Register a user's tasks and their options as choices for task=NAME.

    A YAML file configs/task/NAME.yaml next to the user's script takes precedence.
    """
    for name, task in tasks.items():
        require_task(name, task)
        folder = relative_config_folder()
        if folder is None or not (folder / "task" / f"{name}.yaml").exists():
            ConfigStore.instance().store(group="task", name=name, node={"name": name, "options": task.Options})


def load_and_run(action: Callable[[Settings], None], tasks: Mapping[str, type], *, command: str) -> None:
    """Compose the settings of a command with Hydra and call `action` with them.

    For errors that the user can fix, the process prints one line instead of a traceback and exits.
    """
    world = read_world()

    @hydra.main(version_base="1.3", config_path=CONFIG_SEARCH_PATH, config_name="train")
    def main(chosen: DictConfig) -> None:
        ignore_library_warnings()
        try:
            settings = resolve_settings(chosen, tasks)
        except ValueError as error:
            exit_with_line(str(error), world, on_all_ranks=True)
        try:
            block_wandb_import(settings.wandb.mode == "disabled")
            action(settings)
        except PeerLost:
            sys.exit(1)
        except (ValueError, OSError, RunFailed, InfraError) as error:
            exit_with_error(error, world, is_dry=settings.plan.only)
        except KeyboardInterrupt:
            print("error: interrupted; complete checkpoints are kept, and the same command resumes the run", file=sys.stderr, flush=True)
            sys.exit(EXIT_INTERRUPTED)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra 1.3.2 then raises errors instead of printing them (_internal/utils.py: run_and_report)
    try:
        sys.argv[1:] = expand_config_flags(sys.argv[1:])
        given = parse_flags(sys.argv[1:])
        require(not given.multirun, "--multirun", True, "all runs would use the same run.dir; start each run with its own command")
        words = choose_length(given.overrides)
        register_tasks(tasks)
        if not given.help and given.cfg != DIFFERENCE:
            sys.argv[1:] = [*(word for word in sys.argv[1:] if word not in given.overrides), *words]  # as Hydra requires
            with exit_with_reader() if given.cfg else nullcontext():
                main()
        elif world.is_main:
            with exit_with_reader():
                print(render_help(given.overrides, command=command) if given.help else render_difference(words))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        exit_with_line(format_error(error, sys.argv[1:]), world, on_all_ranks=True)
    except ValueError as error:  # e.g. for an unknown flag
        exit_with_line(str(error), world, on_all_ranks=True)


def block_wandb_import(is_disabled: bool) -> None:
    """Prevent other libraries from importing wandb if the run does not use it.

    megatron-core 0.16.1 imports wandb. If a process that has imported wandb is killed, wandb's
    directories remain in /tmp.
    """
    loaded = sys.modules.pop("wandb", None)
    if is_disabled or loaded is not None:
        sys.modules["wandb"] = cast(Any, loaded)  # None blocks the import


def exit_with_error(error: Exception, world: World, *, is_dry: bool = False) -> NoReturn:
    """Print an error as one line and exit.

    If all ranks raised the error, only the main rank prints the error. All ranks are assumed to
    have raised the error if `is_dry` is set or if the error comes from world.raise_on_all_ranks.
    """
    exit_with_line(add_disk_full_hint(str(error)), world, on_all_ranks=is_dry or isinstance(error, SharedValueError | SharedOSError))


def add_disk_full_hint(line: str) -> str:
    """Add the path of the full disk to a "no space left" message that contains no file name.

    Errors from locks and shared-memory segments contain no file name. Other messages are returned
    unchanged.
    """
    if line != str(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
        return line
    full = [str(place) for place in (SHARED_MEMORY, Path(tempfile.gettempdir())) if shutil.disk_usage(place).free < MIN_FREE_BYTES]
    return f"{' and '.join(full) or 'a disk'}: {line}; free some space, or start a container with a larger --shm-size"


def exit_with_line(line: str, world: World, *, on_all_ranks: bool = False) -> NoReturn:
    """Print a line and exit with code 1; if `on_all_ranks` is set, only the main rank prints."""
    if not world.is_main:
        time.sleep(NON_MAIN_DELAY_S)
    if world.is_main or not on_all_ranks:
        print(f"error: {to_printable(line)}", file=sys.stderr, flush=True)
    sys.exit(1)


def resolve_settings(chosen: DictConfig, tasks: Mapping[str, type] = MappingProxyType({})) -> Settings:
    """Return the validated settings as plain dataclasses.

    A model name of the Hugging Face hub is replaced by its folder in the local cache, if it is
    there.
    If the task is user-defined, its options are validated against the task's Options dataclass.

    Raises:
        ValueError: A value is invalid or missing, or a key that was added with +key=value is
            unknown.
    """
    task_type = tasks.get(OmegaConf.select(chosen, "task.name", default=""))
    try:
        if task_type is not None and task_type.Options is not None:
            given = OmegaConf.select(chosen, "task.options")
            OmegaConf.update(chosen, "task.options", OmegaConf.merge(OmegaConf.structured(task_type.Options), given or {}), merge=False)
        reject_unknown_keys(chosen)
        settings = cast(Settings, OmegaConf.to_object(chosen))
    except MissingMandatoryValue as error:
        if error.full_key == "task.name":
            raise ValueError(missing_task_line()) from error
        raise ValueError(f"{error.full_key}=???: has no default; set it on the command line") from error
    except OmegaConfBaseException as error:
        raise ValueError(format_error(error, sys.argv[1:])) from error
    if settings.evaluation.urls:  # model.path is then a name on the server
        return settings
    return replace(settings, model=replace(settings.model, path=resolve_hub_name(settings.model.path)))
