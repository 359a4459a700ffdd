"""Computes digests of data files to detect changed rows when a run is resumed.

Checkpoints store the digests. The seed and the order of the rows determine the rows that each step
trains on. The digests do not cover image files that rows name by path.
"""

import hashlib
from collections.abc import Mapping

from megatron_rl.config import DataSettings
from megatron_rl.data.dataset_files import find_data_files
from megatron_rl.io.sampled_digest import compute_sampled_digest


def data_digests(data: DataSettings) -> dict[str, str]:
    """Compute one SHA-256 digest for the files of each data setting.

    The settings are task.data.train, task.data.eval and task.data.demonstrations; settings without
    files are omitted. A digest depends on the order of the files.
    """
    named = {"train": data.train, "eval": data.eval, "demonstrations": data.demonstrations}
    return {f"task.data.{name}": _digest_of_files(names, f"task.data.{name}") for name, names in named.items() if names}


def _digest_of_files(names: list[str], key: str) -> str:
    digests = [compute_sampled_digest(path) for name in names for path in find_data_files(name, key=key)]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def check_same_data(recorded: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Raise ValueError if the digest of a setting's data files differs from the recorded digest.

    The message contains both digests.
    """
    for key in found:
        if recorded.get(key) != found[key]:
            raise ValueError(
                f"{key}: the data files have changed since this run began: their digest is {found[key]}, but was {recorded.get(key)}; "
                "restore the original files, or choose another run.dir"
            )
