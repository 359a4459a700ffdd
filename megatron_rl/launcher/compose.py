"""Composes the settings of runs for other commands, e.g. launch/sweep.py and launch/submit.py."""

from collections.abc import Sequence

from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megatron_rl.cli.app import CONFIG_SEARCH_PATH, resolve_settings
from megatron_rl.cli.config_errors import format_error
from megatron_rl.cli.flags import choose_length
from megatron_rl.config import Settings


def compose_settings(overrides: Sequence[str]) -> Settings:
    """Return the settings that launch/train.py would use with these overrides.

    Raises:
        ValueError: The overrides are invalid. The message is the line that launch/train.py would
            print.
    """
    words = choose_length(overrides)
    try:
        with initialize_config_module(CONFIG_SEARCH_PATH.removeprefix("pkg://"), version_base="1.3"):
            return resolve_settings(compose("train", overrides=words))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ValueError(format_error(error, overrides)) from error
