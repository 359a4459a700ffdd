"""The door: hydra on the outside, plain dataclasses within. See `python launch/train.py --help`."""

import os
import sys
import time
import warnings

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from megatron_rl.config import Settings
from megatron_rl.types import HostFault, RunFailed
from megatron_rl.world import place

QUIET_S = 20.0
"""A mistake that every rank sees is told by the main one: the others wait this long before they speak, and torchrun ends them sooner."""

ConfigStore.instance().store(name="schema", node=Settings)


@hydra.main(version_base="1.3", config_path="../configs", config_name="train")
def main(chosen: DictConfig) -> None:
    """Build the settings and hand over to megatron_rl; a user's mistake ends as one line, never as a traceback."""
    sys.stderr = sys.__stderr__
    warnings.filterwarnings("ignore", module="megatron")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # megatron-core 0.16.1 calls collectives by their older names
    world = place()
    try:
        settings = resolve(chosen)
        from megatron_rl.start import run

        run(settings)
    except (ValueError, OSError, RunFailed, HostFault, OmegaConfBaseException) as error:
        if not world.is_main:
            time.sleep(QUIET_S)
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


def resolve(chosen: DictConfig) -> Settings:
    """The plain dataclasses, checked. ValueError: a value is wrong or lacking, or a key was added (+key=value) that no dataclass has."""
    try:
        return OmegaConf.to_object(chosen)
    except MissingMandatoryValue as error:
        raise ValueError(f"{error.full_key}=???: has no default; give it on the command line") from error
    except AttributeError as error:
        raise ValueError(f"{error}: no such key; python launch/train.py --help lists all") from error


if __name__ == "__main__":
    if place().is_main:
        main()
    else:
        silence = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (as long as the process) hydra's own messages, about a misspelt key say, come from the main rank
        try:
            main()
        except SystemExit:
            if sys.stderr is silence:
                time.sleep(QUIET_S)
            raise
