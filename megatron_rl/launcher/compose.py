"""Settings of a command line that is not this process's own: of a task of a sweep, of a job to submit."""

from collections.abc import Sequence

from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megatron_rl.cli.app import CONFIG_SEARCH_PATH, resolve_settings
from megatron_rl.cli.config_errors import format_error
from megatron_rl.config import Settings


def compose_settings(overrides: Sequence[str]) -> Settings:
    """As launch/train.py would make them. ValueError: the line that it would end in."""
    try:
        with initialize_config_module(CONFIG_SEARCH_PATH.removeprefix("pkg://"), version_base="1.3"):
            return resolve_settings(compose("train", overrides=list(overrides)))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ValueError(format_error(error, overrides)) from error
