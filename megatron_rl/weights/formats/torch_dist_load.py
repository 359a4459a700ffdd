"""Loads an untrusted torch_dist folder with dist_checkpointing, but without unsafe unpickling.

dist_checkpointing alone would unpickle four parts of the folder (megatron-core 0.16.1, torch 2.13).
- `.metadata` is read with pickle.load. If this fails, `__R.metadata` of every rank is read in the
  same way (checkpoint/filesystem.py).
- Chunks are read with torch.load and weights_only. Megatron allows additional classes for the whole
  process (safe_globals.py).
- Entries that the metadata declares as bytes are read with torch.load without weights_only
  (default_planner.py, load_bytes).
- common.pt is read by strategies/common.py.

This module reads `.metadata`, chunks and common.pt with safe_unpickler.py instead, and never reads
an entry declared as bytes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict
from megatron.core.dist_checkpointing.strategies import torch as strategy
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from megatron_rl.weights.formats import pickle_tensors
from megatron_rl.weights.formats.pickle_tensors import StoredTensor
from megatron_rl.weights.formats.torch_dist import FORMAT_METADATA, MERGE_PREFIX, McoreTensors, read_format_metadata

COMMON = "common.pt"
"""Name of the file with the state that is not stored as sharded tensors."""


def load(wanted: ShardedStateDict, folder: Path, *, key: str, with_optimizer: bool) -> StateDict:
    """Load the tensors in `wanted` from a folder with dist_checkpointing.load.

    If `with_optimizer` is True, the checkpoint must contain exactly the requested tensors,
    including the optimizer's. The caller must already have verified the files against their
    digests. Raises ValueError if the folder is damaged or was not written by torch and Megatron.
    `key` is the config key that contains `folder`, used in error messages.
    """
    if read_format_metadata(folder, key=key) != FORMAT_METADATA:
        raise ValueError(f"{key}={folder}: its metadata.json specifies a format other than Megatron's torch_dist; copy it again")
    stored = McoreTensors(folder, key=key, with_optimizer=with_optimizer, is_verified=with_optimizer)
    entries = stored.metadata.state_dict_metadata.items()
    no_tensor = next((name for name, entry in entries if isinstance(entry, BytesStorageMetadata)), None)
    if with_optimizer and no_tensor is not None:
        raise ValueError(f"{key}={folder}: {no_tensor} is a bytes entry, but a training state contains only tensors; copy it again")
    if "merge" in wanted and not any(name.startswith(MERGE_PREFIX) for name, _ in entries):
        raise ValueError(f"{key}={folder}: contains no merge of checkpoints; resume without distill.merge, or choose another run.dir")
    strict = StrictHandling.RAISE_ALL if with_optimizer else StrictHandling.ASSUME_OK_UNEXPECTED
    with _using_reader(_Reader(stored)):
        found = dist_checkpointing.load(wanted, str(folder), strategy.TorchDistLoadShardedStrategy(), _EmptyCommonState(), strict=strict)
    return cast("StateDict", found)


def read_common(folder: Path) -> object:
    """Return the content of common.pt, with its tensors loaded.

    Raises ValueError if the file was not written by torch.save.
    """
    return _read_tensors(pickle_tensors.load(folder / COMMON))


def _read_tensors(value: object) -> object:
    if isinstance(value, StoredTensor):
        return value.read()
    if type(value) is dict:
        return {key: _read_tensors(item) for key, item in value.items()}
    return [_read_tensors(item) for item in value] if type(value) is list else value


class _EmptyCommonState(TorchCommonLoadStrategy):
    def load_common(self, checkpoint_dir: str | Path) -> StateDict:
        return {}


class _Reader(FileSystemReader):
    """Checkpoint reader for Megatron that gets metadata and chunks from McoreTensors."""

    def __init__(self, stored: McoreTensors) -> None:
        super().__init__(stored.folder)
        self._stored = stored

    def read_metadata(self) -> Metadata:
        return self._stored.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type is not LoadItemType.TENSOR:
                raise ValueError(f"{item.storage_index.fqn} is a bytes entry in the checkpoint, but a tensor in the model")
            assert item.storage_index.offset is not None
            chunk = self._stored.read_chunk(item.storage_index.fqn, item.storage_index.offset)
            target = planner.resolve_tensor(item).detach()
            target.copy_(narrow_tensor_by_index(chunk, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        done: Future[None] = torch.futures.Future()
        done.set_result(None)
        return done


@contextmanager
def _using_reader(reader: _Reader) -> Iterator[None]:
    """Make Megatron use `reader` inside the block instead of creating its own reader.

    Megatron creates readers with a module-level function (strategies/torch.py), which this context
    manager replaces.
    """
    make = strategy._get_filesystem_reader
    strategy._get_filesystem_reader = lambda folder, cache_metadata=False: reader
    try:
        yield
    finally:
        strategy._get_filesystem_reader = make
