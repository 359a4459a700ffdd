"""Settings of a command line that is not this process's own: of a task of a sweep, of a job to submit."""

from collections.abc import Sequence

from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megatron_rl.cli.app import CONFIGS, resolve
from megatron_rl.cli.config_errors import retold
from megatron_rl.config import Settings


def composed(words: Sequence[str]) -> Settings:
    """As launch/train.py would make them. ValueError: the line that it would end in."""
    try:
        with initialize_config_module(CONFIGS.removeprefix("pkg://"), version_base="1.3"):
            return resolve(compose("train", overrides=list(words)))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ValueError(retold(error, words)) from error
