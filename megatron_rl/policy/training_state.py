"""The policy's training state on disk: Megatron's `torch_dist` format, planned together, written by a thread, readable at any layout.

A folder holds the weights under `Row.checkpoint_key`, optimizer tensors under keys that begin with `optimizer.`, and in common.pt what is
neither: the number of updates, the layout, and the generators of every rank. AdamW's step follows from the number of updates, the learning
rate from the run's step.

Writing in the background is a thread of this process with torch's FileSystemWriter, not megatron-core 0.16.1's AsyncCallsQueue
(dist_checkpointing/strategies/async_utils.py). Tried on CPUs with gloo: its persistent worker ends with ZeroDivisionError (it divides by
the number of GPUs); its temporal worker is a fork that holds gloo's sockets, so that the peers of a killed rank hear of its death when the
fork ends (25 s for one of 25 s, at once without); and the manager process of each rank's queue outlives a killed rank.
"""

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import distribute_main_replicas_with_precomputed_distribution
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from megatron.core.optimizer import ChainedOptimizer
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import WriteResult

from megatron_rl.distributed.world import is_collective_error, run_on_rank_zero
from megatron_rl.models.name_mapping import padded_vocab
from megatron_rl.policy.optimizer_state import init_moments, optimizer_tensors, reset_optimizer_state, set_step
from megatron_rl.policy.padding import add_padding, strip_padding
from megatron_rl.policy.parallel import Layout, seed_generators
from megatron_rl.weights.formats import torch_dist_load
from megatron_rl.weights.formats.digests import compute_sha256

_METADATA = {"non_homogeneous_layers": True}
"""Of Megatron's sharded state dicts: a key for each layer."""


@dataclass(slots=True, frozen=True)
class TrainingState:
    """What is saved and loaded: all of it lives in the policy, and loading fills it in place."""

    chunks: nn.ModuleList
    """The bare model chunks of this rank, in the order of the virtual pipeline."""
    optimizer: ChainedOptimizer
    layout: Layout
    num_updates: int
    """Optimizer updates that made it."""


def sharded_weights(chunks: nn.ModuleList) -> dict[str, ShardedStateDict]:
    """Megatron's description of this rank's weights, by the number of the chunk; `dist_checkpointing.load` fills it at any layout.

    The linear layers' `_extra_state` (empty but for fp8) is left out, so that files do not depend on the layer spec.
    """
    states = {str(number): chunk.sharded_state_dict(metadata=dict(_METADATA)) for number, chunk in enumerate(chunks)}
    return {number: {name: part for name, part in state.items() if not name.endswith("_extra_state")} for number, state in states.items()}


class AsyncSave:
    """A checkpoint on its way to disk. Every rank makes it, asks it and finishes it together with the others.

    What is written is the state at construction: training may go on at once.
    """

    def __init__(self, state: TrainingState, folder: Path, *, background: bool) -> None:
        """`folder` exists. In the background, CPU tensors are copied first; otherwise this returns when they are written."""
        self._folder = folder
        self.digests: dict[Path, str] = {}
        """Digests of the files with tensors; filled on rank 0 when the save is finished."""
        if state.num_updates == 0:  # while its critic warms up: AdamW has no moments yet, and Megatron saves what it has
            reset_optimizer_state(state.optimizer)
        self._common = io.BytesIO()
        torch.save(_common(state), self._common)
        weights = sharded_weights(state.chunks)
        moments = optimizer_tensors(state.optimizer, weights, vocab_size=_vocab_size(state))
        sharded, _ = save_preprocess({"weights": strip_padding(weights, _vocab_size(state))} | ({"optimizer": moments} if moments else {}))
        _balance_over_ranks(sharded["weights"])
        self._writer = FileSystemWriter(folder)
        planner = MCoreSavePlanner(flatten_state_dict=False)
        planner.set_up_planner(mcore_to_pyt_state_dict(_own_parts(sharded, copy=background)), is_coordinator=dist.get_rank() == 0)
        plan, self._metadata = _make_save_plan(self._writer, planner)
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._written = self._thread.submit(self._write, plan, planner)
        if not background:
            wait([self._written])

    def _write(self, plan: SavePlan, planner: MCoreSavePlanner) -> tuple[list[WriteResult], dict[str, str]]:
        """Write this rank's files, and return their digests, read from the page cache while they are in it."""
        results = self._writer.write_data(plan, planner).value()
        names = {result.storage_data.relative_path for result in results}
        return results, {name: compute_sha256(self._folder / name) for name in sorted(names)}

    def is_written(self) -> bool:
        """Whether the tensors of all ranks are on disk (or one of them could not be written): `finish` will not wait for long."""
        waiting = torch.tensor(int(not self._written.done()))
        dist.all_reduce(waiting)
        return int(waiting) == 0

    def finish(self, *, group: dist.ProcessGroup | None = None) -> None:
        """Wait in `group` for all ranks and complete the folder. Where one of them could not write, every rank raises OSError."""
        error = self._written.exception()
        self._thread.shutdown()
        errors: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(errors, "" if error is None else f"rank {dist.get_rank()}: {_first_cause(error)}", group=group)
        failed = [text for text in errors if text]
        if failed:
            raise OSError(failed[0])
        written = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(self._written.result(), written, group=group)
        run_on_rank_zero(partial(self._complete, written), group=group)

    def _complete(self, written: list[tuple[list[WriteResult], dict[str, str]]]) -> None:
        self._writer.finish(self._metadata, [results for results, _ in written])
        self.digests = {self._folder / name: sha256 for _, digests in written for name, sha256 in digests.items()}
        (self._folder / torch_dist_load.COMMON).write_bytes(self._common.getvalue())
        save_config(CheckpointingConfig("torch_dist"), str(self._folder))


@torch.no_grad()
def load(state: TrainingState, folder: Path, *, seed: int) -> int:
    """Fill the policy from a checkpoint, whatever layout wrote it, and return the number of updates that made it.

    The generators go on where they stopped at the layout that wrote them; at another one they start anew, seeded by `seed` and the number
    of updates. ValueError: the checkpoint is not of this model.
    """
    with _naming_errors(folder):
        common = _read_common(folder)
        init_moments(state.optimizer)
        sharded = sharded_weights(state.chunks)
        moments = optimizer_tensors(state.optimizer, sharded, vocab_size=_vocab_size(state))
        wanted = {"weights": strip_padding(sharded, _vocab_size(state)), "optimizer": moments}
        loaded = torch_dist_load.load(wanted, folder, key="run.dir", with_optimizer=True)
    _fill(state.chunks, loaded["weights"])
    set_step(state.optimizer, common["updates"])
    if common["layout"] == _layout_sizes(state):
        with _naming_errors(folder):
            _set_generators(common["generators"][dist.get_rank()])
    else:
        seed_generators(seed + common["updates"])
    return common["updates"]


@torch.no_grad()
def load_weights(chunks: nn.ModuleList, folder: Path, *, key: str) -> None:
    """Fill model chunks from a checkpoint's weights alone. ValueError, under the option `key`: the checkpoint is not of this model."""
    with _naming_errors(folder):
        wanted = strip_padding(sharded_weights(chunks), chunks[0].spec.vocab_size)
        loaded = torch_dist_load.load(wanted, folder, key=key, with_optimizer=False)
    _fill(chunks, loaded)


@contextmanager
def _naming_errors(folder: Path) -> Iterator[None]:
    """Megatron's and torch's own errors in one line that names the folder; those of peers and of a GPU's memory as they are."""
    try:
        yield
    except (CheckpointException, CheckpointingException, RuntimeError, TypeError, IndexError, KeyError) as error:
        if is_collective_error(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        reason = " ".join(str(first).split())[:300]
        raise ValueError(f"{folder}: cannot be loaded into this model; load it with the settings that wrote it ({reason})") from error


def _fill(chunks: nn.ModuleList, weights: dict[str, dict]) -> None:
    for number, chunk in enumerate(chunks):
        num_rows = padded_vocab(chunk.spec.vocab_size, chunk.layout.tp) // chunk.layout.tp
        unfilled = chunk.load_state_dict(add_padding(weights[str(number)], num_rows), strict=False)
        assert all(name.endswith("_extra_state") for name in (*unfilled.missing_keys, *unfilled.unexpected_keys)), unfilled


def _vocab_size(state: TrainingState) -> int:
    return state.chunks[0].spec.vocab_size


def _common(state: TrainingState) -> dict[str, object]:
    """What is no tensor of the model: plain values and byte tensors, because nothing else is read back."""
    generators: list = [None] * dist.get_world_size()
    dist.all_gather_object(generators, _generators())
    return {"updates": state.num_updates, "layout": _layout_sizes(state), "generators": generators}


def _read_common(folder: Path) -> dict[str, object]:
    """The same from the disk. ValueError: it is something else."""
    path = folder / torch_dist_load.COMMON
    if not path.is_file():
        raise ValueError(f"{folder}: no {path.name} in it; copy the whole checkpoint")
    common = torch_dist_load.read_common(folder)
    kinds = {key: type(value) for key, value in common.items()} if isinstance(common, dict) else {}
    if kinds != {"updates": int, "layout": dict, "generators": list}:
        raise ValueError(f"{path}: is not what a run left; copy the checkpoint again")
    return common


def _layout_sizes(state: TrainingState) -> dict[str, int]:
    layout = state.layout
    return {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp, "dp": layout.dp}


def _balance_over_ranks(weights: ShardedStateDict) -> None:
    """Replicas of a tensor are dealt to the data-parallel ranks that hold it, so that each of them writes a part of the weights."""
    group = parallel_state.get_data_parallel_group()
    dealt = determine_main_replica_uniform_distribution(weights, group)
    distribute_main_replicas_with_precomputed_distribution(weights, group, dealt)


def _own_parts(sharded: ShardedStateDict, *, copy: bool) -> dict[str, list[ShardedTensor | ShardedObject]]:
    """What this rank writes, by key: of replicas the first; tensors on the host, and its own if `copy`."""
    own: dict[str, list[ShardedTensor | ShardedObject]] = {}
    for part in nested_values(sharded):
        if not is_main_replica(part.replica_id):
            continue
        if isinstance(part, ShardedTensor):
            part.data = part.data.detach().to("cpu", copy=copy)
        own.setdefault(part.key if isinstance(part, ShardedTensor) else part.unique_key, []).append(part)
    return own


def _make_save_plan(writer: FileSystemWriter, planner: MCoreSavePlanner) -> tuple[SavePlan, Metadata | None]:
    """Rank 0 checks that the ranks' parts make whole tensors and hands out file names. The metadata is rank 0's, None elsewhere."""
    is_main = dist.get_rank() == 0
    writer.set_up_storage_writer(is_main)
    plans = [None] * dist.get_world_size() if is_main else None
    dist.gather_object(writer.prepare_local_plan(planner.create_local_plan()), plans)
    metadata = None
    if is_main:
        plans, metadata = planner.create_global_plan(plans)
        plans = writer.prepare_global_plan(plans)
    mine: list = [None]
    dist.scatter_object_list(mine, plans)
    return planner.finish_plan(mine[0]), metadata


def _first_cause(error: BaseException) -> BaseException:
    """What began it: torch.save turns the OSError of a full disk into a RuntimeError about positions."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _generators() -> dict[str, torch.Tensor]:
    """States of the host's and the device's generator and of Megatron's own streams (dropout under tensor parallelism)."""
    streams = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {"host": torch.get_rng_state(), "device": torch.cuda.get_rng_state(), **{f"stream {name}": s for name, s in streams.items()}}


def _set_generators(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["host"])
    torch.cuda.set_rng_state(states["device"])
    streams = {name.removeprefix("stream "): s for name, s in states.items() if name.startswith("stream ")}
    tensor_parallel.get_cuda_rng_tracker().set_states(streams)
