"""Digests of a run's data files, stored in checkpoints to prevent resuming with different rows.

The seed and the order of the rows determine the rows that each step trains on. Image files that
rows name by path are not included in the digests.
"""

import hashlib
from collections.abc import Mapping

from megatron_rl.config import DataSettings
from megatron_rl.data.dataset_files import find_data_files
from megatron_rl.io.sampled_digest import compute_sampled_digest


def data_digests(data: DataSettings) -> dict[str, str]:
    """Compute a SHA-256 digest of the files for each data setting that names files.

    The settings are task.data.train, task.data.eval and task.data.demonstrations. The order of the
    files matters.
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
                f"{key}: the rows of its files changed since this run began: their digest is {found[key]}, and was {recorded.get(key)}; "
                "restore the original files, or choose another run.dir"
            )
