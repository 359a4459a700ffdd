"""Checks of a job on several nodes, before the model is built (docs/running.md).

The checks ensure that all nodes have the same files, and that no engine spans nodes. A node is the
set of processes started by one launcher. Rank 0 creates marker files, and the other nodes check
that these files are visible. Each marker has a new random name, so that a network file system
cannot report a cached result.
"""

import hashlib
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config import Settings, require
from megatron_rl.distributed.world import World, all_gather_object, run_on_rank_zero
from megatron_rl.io.bounded_files import read_bytes
from megatron_rl.run.paths import explain_write_errors

MAX_CONFIG_BYTES = 16 << 20
SHARED_FOLDER_REMEDY = "put it in a folder that all nodes share"


@dataclass(slots=True, frozen=True, kw_only=True)
class NodeReport:
    """State of a node, as observed by the first process on that node."""

    host: str
    node: int
    num_processes: int
    run_dir_error: str = ""
    """Error message if this node and rank 0 have different run directories, else empty."""
    file_fingerprints: Mapping[str, Mapping[str, object]]
    """Fingerprints of the files that the settings name, keyed by setting and path; missing files
    are omitted.
    """
    sees_judge_cache: bool = False
    """True if the directory of rank 0's judge cache is visible on this node."""

    def __str__(self) -> str:
        return f"node {self.node} ({self.host})"


def check_nodes(settings: Settings, world: World) -> None:
    """Raise ValueError on every rank if the nodes are inconsistent, e.g. if their files differ.

    Collective over all ranks. Rank 0 must hold the lock of the run directory.
    """
    if world.num_nodes == 1:
        return
    nonce = run_on_rank_zero(lambda: uuid.uuid4().hex)
    with explain_write_errors(Path(settings.run.dir)):
        run_on_rank_zero(lambda: [mark.touch() for mark in marker_paths(settings, nonce)])
    try:
        views = all_gather_object(inspect_node(settings, world, nonce) if world.is_local_main else None)
    finally:
        run_on_rank_zero(lambda: [mark.unlink(missing_ok=True) for mark in marker_paths(settings, nonce)])
    require_same_nodes(settings, [view for view in views if view is not None])


def marker_paths(settings: Settings, nonce: str) -> list[Path]:
    """Return the paths of the marker files that rank 0 creates for the other nodes.

    One marker file is in the run directory. If the run will write the judge's cache file, another
    marker file is next to the cache file.
    """
    cache = Path(settings.task.judge.cache)
    beside = [cache.with_name(f".node_{nonce}")] if cache.name and settings.task.judge.urls and cache.parent.is_dir() else []
    return [Path(settings.run.dir) / f".node_{nonce}", *beside]


def inspect_node(settings: Settings, world: World, nonce: str) -> NodeReport:
    """Return the state of this process's node."""
    in_run, *beside = marker_paths(settings, nonce)
    own, trouble = in_run.with_name(f"{in_run.name}_{world.node}"), ""
    if not in_run.exists():
        trouble = "does not see a file that rank 0 wrote there"
    else:
        try:
            own.touch()
            own.unlink()
        except OSError as error:
            trouble = f"cannot write there ({error})"
    return NodeReport(
        host=socket.gethostname(), node=world.node, num_processes=world.local_size, run_dir_error=trouble,
        file_fingerprints={key: dict(part for path in paths for part in describe_path(Path(path)).items()) for key, paths in
        source_files(settings).items()}, sees_judge_cache=any(mark.exists() for mark in beside),
    )  # fmt: skip


def source_files(settings: Settings) -> dict[str, list[str]]:
    """Return the files and directories that every node reads, keyed by setting."""
    data = settings.task.data
    given = {
        "model.path": [settings.model.path], "lora.path": [settings.lora.path], "critic.path": [settings.critic.path],
        "distill.teacher": settings.distill.teacher_paths,
        "task.data.train": data.train, "task.data.eval": data.eval, "task.data.demonstrations": data.demonstrations,
    }  # fmt: skip
    return {key: paths for key, paths in given.items() if any(paths)}


def describe_path(path: Path) -> dict[str, str | int]:
    """Return the fingerprint of a file, or of each file in a model directory, keyed by path.

    A fingerprint is the size of a file, or the digest of a model's config file. The result is empty
    if the path does not exist.
    """
    if path.is_file():
        return {str(path): path.stat().st_size}
    shapes = {str(file): _digest(file) for file in sorted(path.glob("*config.json"))}
    return shapes | {str(file): file.stat().st_size for file in sorted(path.glob("*.safetensors"))}


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(read_bytes(file, at_most=MAX_CONFIG_BYTES)).hexdigest()
    except ValueError as error:
        raise ValueError(f"{file}: {error}; copy the model again") from error


def require_same_nodes(settings: Settings, reports: Sequence[NodeReport]) -> None:
    """Raise ValueError if a node differs from the first node, or an engine would span nodes."""
    first, size = reports[0], settings.engine.tp if settings.engine.mode == "colocated" else 1
    for view in reports:
        num = view.num_processes
        fitting = ", ".join(str(tp) for tp in (1, 2, 4, 8, 16) if num % tp == 0)
        require(
            num % size == 0,
            "engine.tp",
            size,
            f"must divide the number of processes on each node, but {view} has {num}; use one of {fitting}",
        )
        require(not view.run_dir_error, "run.dir", settings.run.dir, f"{view} {view.run_dir_error}; {SHARED_FOLDER_REMEDY}")
        for key, paths in source_files(settings).items():
            here, there = first.file_fingerprints[key], view.file_fingerprints[key]
            differ = [name for name in {**here, **there} if here.get(name) != there.get(name)]
            remedy = f"{view} does not have the same {', '.join(differ[:1])} as {first}; copy it, or {SHARED_FOLDER_REMEDY}"
            require(not differ, key, ", ".join(paths), remedy)
        remedy = f"is shared by {first} and {view}, but SQLite does not work on network disks; choose a folder that is local to each node"
        require(not view.sees_judge_cache or view.host == first.host, "task.judge.cache", settings.task.judge.cache, remedy)
