"""From the command line to settings and on to a run, with what a user's own file brings along. Hydra outside, plain dataclasses within."""

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from megatron_rl.config import Settings
from megatron_rl.stop import die_with_parent
from megatron_rl.types import HostFault, RunFailed
from megatron_rl.world import place

CONFIGS = "pkg://megatron_rl.configs"
QUIET_S = 20.0
"""What every rank sees is told by the main one: the others wait this long before they speak or end, and torchrun ends them sooner."""
STOPPED = os.EX_TEMPFAIL
"""Exit code of a run that was asked to stop and did: the same command goes on."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a run that was interrupted twice."""

ConfigStore.instance().store(name="schema", node=Settings)


class BesideTheFile(SearchPathPlugin):
    """The folder configs/ beside the file that was started, where there is one, is searched before ours."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        folder = Path(sys.argv[0]).resolve().parent / "configs"
        if folder.is_dir():
            search_path.prepend("beside-the-file", f"file://{folder}")


Plugins.instance().register(BesideTheFile)


def cli(*, tasks: Mapping[str, type] | None = None) -> None:
    """Do what the command line says. `tasks` adds a user's own to those that ship: {"mine": MyTask}, chosen by task.name=mine.

    The first word may be `doctor`, which looks at what the run needs and does not start it.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun or launch/spawn.py, and by no shell that may go home first
        die_with_parent()
    examines = sys.argv[1:2] == ["doctor"]
    if examines:
        del sys.argv[1]

    def act(settings: Settings) -> None:
        if examines:
            from megatron_rl.cli.doctor import examine_and_show  # brings torch and transformers

            sys.exit(examine_and_show(settings))
        from megatron_rl.start import run  # brings Megatron

        result = run(settings, tasks=tasks)
        if result is not None and not result.is_finished:
            if not place().is_main:
                time.sleep(QUIET_S)
            sys.exit(STOPPED)

    read_and(act)


def read_and(act: Callable[[Settings], None]) -> None:
    """Let hydra read the command line, and act on the settings; a user's mistake ends as one line, never as a traceback."""
    world = place()

    @hydra.main(version_base="1.3", config_path=CONFIGS, config_name="train")
    def main(chosen: DictConfig) -> None:
        sys.stderr = sys.__stderr__
        warnings.filterwarnings("ignore", module="megatron")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # megatron-core 0.16.1 calls collectives by older names
        try:
            act(resolve(chosen))
        except (ValueError, OSError, RunFailed, HostFault, OmegaConfBaseException) as error:
            if not world.is_main:
                time.sleep(QUIET_S)
            print(f"error: {error}", file=sys.stderr, flush=True)
            sys.exit(1)
        except KeyboardInterrupt:
            print("error: interrupted; the checkpoints that were complete stay, and the same command goes on", file=sys.stderr, flush=True)
            sys.exit(INTERRUPTED)

    if world.is_main:
        main()
        return
    silence = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (as long as the process) hydra's own messages, about a misspelt key say, come from the main rank
    try:
        main()
    except SystemExit:
        if sys.stderr is silence:
            time.sleep(QUIET_S)
        raise


def resolve(chosen: DictConfig) -> Settings:
    """The plain dataclasses, checked. ValueError: a value is wrong or lacking, or a key was added (+key=value) that no dataclass has."""
    try:
        return OmegaConf.to_object(chosen)
    except MissingMandatoryValue as error:
        raise ValueError(f"{error.full_key}=???: has no default; give it on the command line") from error
    except AttributeError as error:
        raise ValueError(f"{error}: no such key; python launch/train.py --help lists all") from error
