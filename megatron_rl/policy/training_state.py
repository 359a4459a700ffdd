"""Training state on disk, in Megatron's `torch_dist` format.

All ranks plan the files together, and a thread on each rank writes that rank's files. The files can
be read with any parallel layout. The keys of weights are given by `ParamMapping.checkpoint_key`.
The keys of optimizer tensors have the prefix `optimizer.`, and those of a merge of checkpoints the
prefix `merge.`. The file common.pt contains the number of updates, the layout, and the states of
the random generators of every rank. AdamW's step count and the learning rate are not stored,
because AdamW's step count equals the number of updates and the learning rate depends only on the
step of the run.

A thread of this process writes in the background with torch's FileSystemWriter. Megatron's
AsyncCallsQueue (megatron-core 0.16.1, dist_checkpointing/strategies/async_utils.py) is not used
because it fails on CPUs with gloo. The persistent worker of AsyncCallsQueue divides by the number
of GPUs and raises ZeroDivisionError. The temporal worker of AsyncCallsQueue is a forked process
that inherits gloo's sockets. If a rank is killed, the other ranks therefore detect the failure only
when the forked process exits. In a measurement with a fork that ran for 25 s, the other ranks
detected the failure after 25 s; without a fork, they detected it immediately. In addition, the
manager process of a killed rank's queue keeps running.
"""

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedStateDict, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import distribute_main_replicas_with_precomputed_distribution
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from megatron.core.optimizer import ChainedOptimizer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from megatron_rl.distributed.world import is_collective_error, run_on_rank_zero
from megatron_rl.models.name_mapping import padded_vocab
from megatron_rl.policy.checkpoint_merge import CheckpointMerge
from megatron_rl.policy.optimizer_state import init_moments, optimizer_tensors, reset_optimizer_state, set_step
from megatron_rl.policy.padding import add_padding, strip_padding
from megatron_rl.policy.parallel import Layout, rng_tracker, seed_generators
from megatron_rl.policy.transformer import ModelChunks
from megatron_rl.weights.formats import torch_dist_load
from megatron_rl.weights.formats.digests import compute_sha256

_METADATA = {"non_homogeneous_layers": True}
"""Option that makes Megatron's sharded state dicts store each layer under its own key."""


@dataclass(slots=True, frozen=True)
class TrainingState:
    """References to the model and the optimizer for saving or loading a training state."""

    chunks: ModelChunks
    """Unwrapped model chunks of this rank, in the order of the virtual pipeline."""
    optimizer: ChainedOptimizer
    layout: Layout
    num_updates: int
    """Number of optimizer updates so far."""
    merge: CheckpointMerge | None = None
    """Merge of the policy's checkpoints (distill.merge)."""


def sharded_weights(chunks: ModelChunks) -> dict[str, ShardedStateDict]:
    """Return one Megatron sharded state dict per model chunk of this rank, keyed by chunk number.

    With the returned state dicts, `dist_checkpointing.load` can read checkpoints that were written
    with any parallel layout. The `_extra_state` entries of linear layers are omitted, so that files
    do not depend on the layer spec. These entries are empty unless fp8 is used.
    """
    states = {str(number): chunk.sharded_state_dict(metadata=dict(_METADATA)) for number, chunk in enumerate(chunks)}
    return {number: {name: part for name, part in state.items() if not name.endswith("_extra_state")} for number, state in states.items()}


class AsyncSave:
    """Checkpoint that is being written, possibly in the background.

    The constructor and all methods are collective. The checkpoint contains the state at the time of
    construction, so training can continue immediately.
    """

    def __init__(self, state: TrainingState, folder: Path, *, background: bool) -> None:
        """Plan the files and start writing them into `folder`, which must exist.

        If `background` is True, CPU tensors are copied first. If `background` is False, the
        constructor returns after this rank's files have been written.
        """
        self._folder = folder
        self.digests: dict[Path, str] = {}
        """SHA-256 digest of each tensor file, keyed by path; filled on rank 0 by `finish`."""
        if state.num_updates == 0:
            # Before the first update (during critic warm-up) AdamW has no moments, but Megatron
            # saves them.
            reset_optimizer_state(state.optimizer)
        self._common = io.BytesIO()
        torch.save(_common(state), self._common)
        weights = sharded_weights(state.chunks)
        moments = optimizer_tensors(state.optimizer, weights, vocab_size=_vocab_size(state))
        parts = {"weights": strip_padding(weights, _vocab_size(state))} | ({"optimizer": moments} if moments else {})
        parts |= _merge_parts(state, weights)
        sharded = cast("ShardedStateDict", save_preprocess(parts)[0])
        for name in sharded.keys() - {"optimizer"}:
            _balance_over_ranks(sharded[name])
        self._writer = FileSystemWriter(folder)
        planner = MCoreSavePlanner(flatten_state_dict=False)
        planner.set_up_planner(mcore_to_pyt_state_dict(_own_parts(sharded, copy=background)), is_coordinator=dist.get_rank() == 0)
        plan, self._metadata = _make_save_plan(self._writer, planner)
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._written = self._thread.submit(self._write, plan, planner)
        if not background:
            wait([self._written])

    def _write(self, plan: SavePlan, planner: MCoreSavePlanner) -> tuple[list[WriteResult], dict[str, str]]:
        """Write this rank's files, then compute their digests from the page cache."""
        results = self._writer.write_data(plan, planner).value()
        names = {result.storage_data.relative_path for result in results}
        return results, {name: compute_sha256(self._folder / name) for name in sorted(names)}

    def is_written(self) -> bool:
        """Return True if writing has succeeded or failed on every rank.

        Collective. Once this method has returned True, `finish` does not wait for tensors to be
        written.
        """
        waiting = torch.tensor(int(not self._written.done()))
        dist.all_reduce(waiting)
        return int(waiting) == 0

    def finish(self, *, group: dist.ProcessGroup | None = None) -> None:
        """Wait until all ranks have written their tensors, then write the remaining files.

        Collectives run in `group`. Raises OSError on every rank if writing failed on any rank.
        """
        error = self._written.exception()
        self._thread.shutdown()
        errors: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(errors, "" if error is None else f"rank {dist.get_rank()}: {_first_cause(error)}", group=group)
        failed = [text for text in errors if text]
        if failed:
            raise OSError(failed[0])
        written: list | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(self._written.result(), written, group=group)
        run_on_rank_zero(partial(self._complete, written), group=group)

    def _complete(self, written: list[tuple[list[WriteResult], dict[str, str]]] | None) -> None:
        assert written is not None and self._metadata is not None
        self._writer.finish(self._metadata, [results for results, _ in written])
        self.digests = {self._folder / name: sha256 for _, digests in written for name, sha256 in digests.items()}
        (self._folder / torch_dist_load.COMMON).write_bytes(self._common.getvalue())
        save_config(CheckpointingConfig("torch_dist"), str(self._folder))


@torch.no_grad()
def load(state: TrainingState, folder: Path, *, seed: int) -> int:
    """Load a checkpoint into the model and optimizer and return its number of updates.

    The checkpoint may have been written with any parallel layout. If the checkpoint was written
    with the current layout, the states of the random generators are restored; otherwise the
    generators are seeded with `seed` plus the number of updates. Raises ValueError if the
    checkpoint does not fit this model.
    """
    with _naming_errors(folder):
        common = _read_common(folder)
        init_moments(state.optimizer)
        sharded = sharded_weights(state.chunks)
        moments = optimizer_tensors(state.optimizer, sharded, vocab_size=_vocab_size(state))
        wanted = {"weights": strip_padding(sharded, _vocab_size(state)), "optimizer": moments, **_merge_parts(state, sharded)}
        loaded = torch_dist_load.load(wanted, folder, key="run.dir", with_optimizer=True)
    _fill(state.chunks, loaded["weights"])
    if state.merge is not None:
        state.merge.load_state(loaded["merge"])
    set_step(state.optimizer, common["updates"])
    if common["layout"] == _layout_sizes(state):
        with _naming_errors(folder):
            _set_generators(common["generators"][dist.get_rank()])
    else:
        seed_generators(seed + common["updates"])
    return common["updates"]


@torch.no_grad()
def load_weights(chunks: ModelChunks, folder: Path, *, key: str) -> None:
    """Load the weights of a checkpoint into model chunks.

    `key` is the config key that contains `folder`, used in error messages. Raises ValueError if the
    checkpoint does not fit this model.
    """
    with _naming_errors(folder):
        wanted = strip_padding(sharded_weights(chunks), chunks[0].spec.vocab_size)
        loaded = torch_dist_load.load(wanted, folder, key=key, with_optimizer=False)
    _fill(chunks, loaded)


@contextmanager
def _naming_errors(folder: Path) -> Iterator[None]:
    """Convert errors raised by Megatron and torch to a one-line ValueError that names the folder.

    Errors from collectives and GPU out-of-memory errors are re-raised unchanged.
    """
    try:
        yield
    except (CheckpointException, CheckpointingException, RuntimeError, TypeError, IndexError, KeyError) as error:
        if is_collective_error(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        reason = " ".join(str(first).split())[:300]
        raise ValueError(f"{folder}: cannot be loaded into this model; use the settings with which it was saved ({reason})") from error


def _fill(chunks: ModelChunks, weights: dict[str, dict]) -> None:
    for number, chunk in enumerate(chunks):
        num_rows = padded_vocab(chunk.spec.vocab_size, chunk.layout.tp) // chunk.layout.tp
        unfilled = chunk.load_state_dict(add_padding(weights[str(number)], num_rows), strict=False)
        assert all(name.endswith("_extra_state") for name in (*unfilled.missing_keys, *unfilled.unexpected_keys)), unfilled


def _merge_parts(state: TrainingState, weights: dict[str, ShardedStateDict]) -> dict[str, ShardedStateDict]:
    return {} if state.merge is None else {"merge": state.merge.sharded_state(weights, vocab_size=_vocab_size(state))}


def _vocab_size(state: TrainingState) -> int:
    return state.chunks[0].spec.vocab_size


def _common(state: TrainingState) -> dict[str, object]:
    """Return the content of common.pt: number of updates, layout and states of random generators.

    Collective. The content consists of plain values and byte tensors, because `_read_common`
    accepts only these types.
    """
    generators: list = [None] * dist.get_world_size()
    dist.all_gather_object(generators, _generators())
    return {"updates": state.num_updates, "layout": _layout_sizes(state), "generators": generators}


def _read_common(folder: Path) -> dict[str, Any]:
    """Read common.pt, which holds the result of `_common`, from a checkpoint folder.

    Raises ValueError if the file is missing or has different keys or types.
    """
    path = folder / torch_dist_load.COMMON
    if not path.is_file():
        raise ValueError(f"{folder}: {path.name} is missing; copy the whole checkpoint")
    common = torch_dist_load.read_common(folder)
    kinds = {"updates": int, "layout": dict, "generators": list}
    if not isinstance(common, dict) or {key: type(value) for key, value in common.items()} != kinds:
        raise ValueError(f"{path}: has unexpected content; copy the checkpoint again")
    return common


def _layout_sizes(state: TrainingState) -> dict[str, int]:
    layout = state.layout
    return {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp, "dp": layout.dp}


def _balance_over_ranks(weights: ShardedStateDict) -> None:
    """Distribute the writing of weights across data-parallel ranks.

    Each weight is written by one of the data-parallel ranks that hold a replica of the weight.
    """
    group = cast("dist.ProcessGroup", parallel_state.get_data_parallel_group())
    distribution = determine_main_replica_uniform_distribution(weights, group)
    distribute_main_replicas_with_precomputed_distribution(weights, group, distribution)


def _own_parts(sharded: ShardedStateDict, *, copy: bool) -> dict[str, list[ShardedBase]]:
    """Return the tensors (in host memory) and objects that this rank writes, grouped by key.

    Only the main replica of a tensor or object is written. If `copy` is True, tensors that are
    already on the host are copied.
    """
    own: dict[str, list[ShardedBase]] = {}
    for part in nested_values(sharded):
        if not is_main_replica(part.replica_id):
            continue
        if isinstance(part, ShardedTensor):
            assert part.data is not None
            part.data = part.data.detach().to("cpu", copy=copy)
        own.setdefault(part.key if isinstance(part, ShardedTensor) else part.unique_key, []).append(part)
    return own


def _make_save_plan(writer: FileSystemWriter, planner: MCoreSavePlanner) -> tuple[SavePlan, Metadata | None]:
    """Plan which rank writes which part of the state to which file.

    Collective. Rank 0 checks that the parts of all ranks together cover every tensor completely,
    and assigns file names. Returns this rank's plan and the metadata; the metadata is None on ranks
    other than 0.
    """
    is_main = dist.get_rank() == 0
    writer.set_up_storage_writer(is_main)
    plans: list | None = [None] * dist.get_world_size() if is_main else None
    dist.gather_object(writer.prepare_local_plan(planner.create_local_plan()), plans)
    metadata = None
    if plans is not None:
        plans, metadata = planner.create_global_plan(plans)
        plans = writer.prepare_global_plan(plans)
    mine: list = [None]
    dist.scatter_object_list(mine, plans)
    return planner.finish_plan(mine[0]), metadata


def _first_cause(error: BaseException) -> BaseException:
    """Return the error at the start of the `__context__` chain.

    For example, torch.save turns the OSError of a full disk into a RuntimeError about file
    positions.
    """
    while error.__context__ is not None:
        error = error.__context__
    return error


def _generators() -> dict[str, torch.Tensor]:
    """Return the states of the host generator, the device generator and Megatron's random streams.

    Megatron's random streams are used for dropout under tensor parallelism.
    """
    streams = rng_tracker().get_states()
    return {"host": torch.get_rng_state(), "device": torch.cuda.get_rng_state(), **{f"stream {name}": s for name, s in streams.items()}}


def _set_generators(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["host"])
    torch.cuda.set_rng_state(states["device"])
    streams = {name.removeprefix("stream "): s for name, s in states.items() if name.startswith("stream ")}
    rng_tracker().set_states(streams)
