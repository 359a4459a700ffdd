"""Plants code in checkpoints of this trainer that runs when it is unpickled.

It creates a folder, which shows that it has run.
"""

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from megatron_rl.run.checkpoints import CheckpointState, read_state, write_state
from megatron_rl.weights.formats.digests import STATE, make_file_record


class PickleExploit:
    """An object whose unpickling calls os.mkdir."""

    def __init__(self, mark: Path) -> None:
        self.marker = mark

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def _exploit_metadata_prefix(folder: Path, mark: Path) -> None:
    """Put the exploit before the metadata, which stays intact."""
    path = folder / ".metadata"
    path.write_bytes(f"cposix\nmkdir\n(S'{mark}'\ntR0".encode() + path.read_bytes())


def _exploit_rank_metadata(folder: Path, mark: Path) -> None:
    """Put the exploit into a rank's own metadata, which torch reads if `.metadata` is
    unreadable.
    """
    (folder / ".metadata").rename(folder / ".kept")
    (folder / ".metadata").write_bytes(b"cposix")
    (folder / "__0.metadata").write_bytes(pickle.dumps(PickleExploit(mark)))


def _change_metadata(folder: Path, change: Callable[[Metadata], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _replace_chunk(metadata: Metadata, key: str, folder: Path, content: object) -> _StorageInfo:
    """Write the content to a new file and make the metadata refer to it in place of a chunk of the
    tensor.
    """
    torch.save(content, folder / "__9_9.distcp")
    index = next(index for index in metadata.storage_data if index.fqn == key)
    metadata.storage_data[index] = _StorageInfo("__9_9.distcp", 0, (folder / "__9_9.distcp").stat().st_size)
    return metadata.storage_data[index]


def _find_key(metadata: Metadata, *, of_optimizer: bool) -> str:
    return next(key for key in sorted(metadata.state_dict_metadata) if key.startswith("optimizer.") == of_optimizer)


def _exploit_tensor(*, of_optimizer: bool) -> Callable[[Path, Path], None]:
    """Replace a chunk of a tensor by another object."""

    def poison(folder: Path, mark: Path) -> None:
        _change_metadata(
            folder,
            lambda metadata: _replace_chunk(metadata, _find_key(metadata, of_optimizer=of_optimizer), folder, PickleExploit(mark)) and None,
        )

    return poison


def _exploit_bytes_entry(*, of_optimizer: bool) -> Callable[[Path, Path], None]:
    """Declare a tensor as bytes in otherwise harmless metadata, because torch loads bytes without
    weights_only.
    """

    def change(metadata: Metadata, folder: Path, mark: Path) -> None:
        key = _find_key(metadata, of_optimizer=of_optimizer)
        place = _replace_chunk(metadata, key, folder, PickleExploit(mark))
        size = metadata.state_dict_metadata[key].size
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        metadata.state_dict_metadata[key].size = size  # Megatron compares it with the model's
        metadata.storage_data[MetadataIndex(key)] = place

    return lambda folder, mark: _change_metadata(folder, lambda metadata: change(metadata, folder, mark))


def _exploit_common(name: str) -> Callable[[Path, Path], None]:
    def poison(folder: Path, mark: Path) -> None:
        common = torch.load(folder / "common.pt", weights_only=True)
        torch.save({**common, name: [PickleExploit(mark)] if name == "generators" else PickleExploit(mark)}, folder / "common.pt")

    return poison


def _name_other_backend(folder: Path, mark: Path) -> None:
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))


EXPLOITS: dict[str, Callable[[Path, Path], None]] = {
    "metadata": _exploit_metadata_prefix,
    "metadata of a rank": _exploit_rank_metadata,
    "a weight called bytes": _exploit_bytes_entry(of_optimizer=False),
    "a moment called bytes": _exploit_bytes_entry(of_optimizer=True),
    "a weight": _exploit_tensor(of_optimizer=False),
    "a moment": _exploit_tensor(of_optimizer=True),
    "number of updates": _exploit_common("updates"),
    "generators": _exploit_common("generators"),
    "backend": _name_other_backend,
}
"""Maps the location of an exploit to the function that plants it: poison(folder, mark). The folder
`mark` exists after the exploit has run.
"""
RUN_BY_TORCH = {"metadata", "a weight called bytes", "a moment called bytes"}
"""Exploits that run when megatron-core 0.16.1 and torch 2.13 load the folder themselves."""


def update_record(checkpoint: Path) -> None:
    """Update run/state.json with records of the checkpoint's current files."""
    write_record(checkpoint, read_state(checkpoint))


def write_record(checkpoint: Path, state: CheckpointState, *, files: object = None) -> None:
    """Write run/state.json with these file records, or with records of the existing files."""
    paths = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path != checkpoint / STATE]
    found = {str(path.relative_to(checkpoint)): make_file_record(path) for path in paths}
    write_state(checkpoint / STATE, asdict(replace(state, files=found if files is None else files)))
