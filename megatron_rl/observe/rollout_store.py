"""Store of every rollout of a run (rollouts.save=all), with one Parquet file per step.

- RUN/rollouts/step_000012.parquet: one row per rollout, with the columns of rollout_schema.py.
- RUN/rollouts/images/KEY.png: images, named as in observe/recorder.py; each image is stored once.

The values that users filter by are stored in separate columns, which can be read without the other
columns. Numbers are restored bit for bit. If the store exceeds rollouts.max_gb, the oldest steps
are evicted, together with the images that no other step uses.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.io.bounded_files import is_regular
from megatron_rl.io.jsonl import write_bytes_atomically
from megatron_rl.io.rollout_codec import IMAGE_KEY_PATTERN, from_record, to_record
from megatron_rl.observe.recorder import ROLLOUTS_FOLDER, image_file_name, image_keys_in, make_image_loader, save_images
from megatron_rl.observe.rollout_schema import SCHEMA, SUMMARY_SCHEMA, summarize_rollout
from megatron_rl.types import TOKEN_COLUMNS, Rollout

ROW_GROUP_SIZE = 64
"""Number of rollouts per row group; reading one rollout decompresses its whole row group."""
GB = 1e9
_UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError, TypeError, MemoryError)
"""Exceptions that may be raised when a damaged file is read."""
STEP_NAME_PATTERN = re.compile(r"step_\d{6,}")
MAX_ERROR_CHARS = 400
"""Maximum length in characters of the error message about a file."""


@dataclass(slots=True, frozen=True)
class StepFileInfo:
    """Size, number of rollouts and image keys of one step's file."""

    num_rollouts: int
    num_bytes: int
    image_keys: frozenset[str]
    """Keys of the images that the file uses."""


class RolloutStore:
    """Writes all rollouts to the run directory, on the main rank.

    In a resumed run, run/superseded_steps.py has already moved the files of repeated steps to
    RUN/superseded.
    """

    def __init__(self, run_dir: Path, *, max_gb: float) -> None:
        self._folder, self._limit = run_dir / ROLLOUTS_FOLDER, max_gb * GB
        self._steps: dict[int, StepFileInfo] = {}
        self._image_sizes: dict[str, int] = {}
        """Maps the key of each image used by a step to the size of the image in bytes."""
        self._jsonl_keys: dict[Path, frozenset[str]] = {}
        """Maps each file of best and worst rollouts to the keys of its images."""
        self.num_evicted = 0
        """Number of rollouts evicted by this attempt."""
        for path in list_step_files(self._folder):
            try:
                self._index_step(path)
            except _UNREADABLE as error:
                told = " ".join(str(error).split())[:MAX_ERROR_CHARS]
                raise ValueError(
                    f"{path}: cannot be read ({told}); move the file to another folder to continue the run without it"
                ) from error

    def record_step(self, step: int, rollouts: Sequence[Rollout], *, num_gen_batches: int) -> None:
        """Write a step, then evict old steps until the store is within its size limit.

        The newest step is never evicted. `num_gen_batches` is the number of generation batches in
        the step.
        """
        path = step_path(self._folder, step)
        save_images(self._folder, rollouts)
        write_step(path, rollouts, step=step, num_gen_batches=num_gen_batches)
        self._index_step(path)
        while self._num_bytes > self._limit and len(self._steps) > 1:
            self._evict_step(min(self._steps))

    def metrics(self) -> dict[str, float]:
        """Return the size of the store as metrics, or an empty mapping if the store is empty."""
        if not self._steps:
            return {}
        held = sum(each.num_rollouts for each in self._steps.values())
        return {"store/gb": self._num_bytes / GB, "store/rollouts": float(held), "store/evicted": float(self.num_evicted)}

    @property
    def _num_bytes(self) -> int:
        return sum(self._image_sizes.values()) + sum(each.num_bytes for each in self._steps.values())

    def _index_step(self, path: Path) -> None:
        table = _open_parquet(path).read(columns=["images"])
        keys = _image_keys(table)
        self._steps[step_number(path)] = StepFileInfo(table.num_rows, path.stat().st_size, keys)
        files = {key: self._folder / image_file_name(key) for key in keys - self._image_sizes.keys()}
        self._image_sizes |= {
            key: file.stat().st_size if file.exists() else 0 for key, file in files.items()
        }  # a user may have removed an image

    def _evict_step(self, step: int) -> None:
        """Remove a step's file and then its images.

        In this order, an interruption may leave images without a step, but never a step without its
        images.
        """
        gone = self._steps.pop(step)
        step_path(self._folder, step).unlink()
        self.num_evicted += gone.num_rollouts
        others = frozenset().union(*(each.image_keys for each in self._steps.values()))
        for key in gone.image_keys - others:
            del self._image_sizes[key]
        for key in gone.image_keys - others - self._best_worst_image_keys():
            (self._folder / image_file_name(key)).unlink(missing_ok=True)

    def _best_worst_image_keys(self) -> frozenset[str]:
        """Return the keys of images in best or worst rollouts; these images must not be deleted."""
        for path in set(self._folder.glob("step_*.jsonl")) - self._jsonl_keys.keys():
            self._jsonl_keys[path] = image_keys_in(path)
        return frozenset().union(*self._jsonl_keys.values())


def step_path(folder: Path, step: int) -> Path:
    """Return the path of a step's file."""
    return folder / f"step_{step:06d}.parquet"


def step_number(path: Path) -> int:
    """Return the step number in a file's name."""
    return int(path.stem.removeprefix("step_"))


def list_step_files(folder: Path) -> list[Path]:
    """Return the step files in a folder, sorted by name.

    Files with other names, such as copies, are skipped.
    """
    return sorted(path for path in folder.glob("step_*.parquet") if STEP_NAME_PATTERN.fullmatch(path.stem))


def write_step(path: Path, rollouts: Sequence[Rollout], *, step: int, num_gen_batches: int) -> None:
    """Write all rollouts of a step in the given order, without their images."""
    rows = [
        _replace_surrogates({**summarize_rollout(rollout, step=step, row_index=place), **_to_row(rollout)})
        for place, rollout in enumerate(rollouts)
    ]
    about = {"step": step, "rounds": num_gen_batches}
    table = pa.Table.from_pylist(rows, schema=SCHEMA.with_metadata({"megatron_rl": json.dumps(about)}))
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = pa.BufferOutputStream()
    pq.write_table(table, encoded, compression="zstd", row_group_size=ROW_GROUP_SIZE)
    write_bytes_atomically(path, encoded.getvalue())


def image_keys_of_step(path: Path) -> frozenset[str]:
    """Return the keys of the images used in a step's file; empty if the file is damaged."""
    try:
        return _image_keys(_open_parquet(path).read(columns=["images"]))
    except _UNREADABLE:
        return frozenset()


def _image_keys(table: pa.Table) -> frozenset[str]:
    """Return the keys of the images in a table, except keys that are not valid file names."""
    return frozenset(key for images in table["images"].to_pylist() for key, _ in images if IMAGE_KEY_PATTERN.fullmatch(key))


def num_rows(path: Path) -> int:
    """Return the number of rollouts in a step's file.

    Raises:
        ValueError: the file is damaged.
    """
    with _errors_with_path(path):
        return _open_parquet(path).metadata.num_rows


def read_num_gen_batches(path: Path) -> int:
    """Return the number of generation batches of a step.

    Raises:
        ValueError: the file was not written by a rollout store.
    """
    with _errors_with_path(path):
        about = (_open_parquet(path).schema_arrow.metadata or {}).get(b"megatron_rl")
        if about is None:
            raise ValueError("contains no step written with rollouts.save=all")
        return int(json.loads(about)["rounds"])


def read_columns(path: Path, names: Sequence[str]) -> pa.Table:
    """Return columns of a step's file, with the types of SCHEMA.

    Raises:
        ValueError: the file is damaged or lacks a column.
    """
    with _errors_with_path(path):
        file = _open_parquet(path)
        lacking = set(names) - set(file.schema_arrow.names)
        if lacking:
            raise ValueError(f"lacks {', '.join(sorted(lacking))}; it was written by another version of this program")
        return file.read(columns=list(names))


def read_rollouts(path: Path, row_indices: Sequence[int] | None = None, *, with_images: bool = True) -> list[Rollout]:
    """Return the rollouts in the given rows of a step, in the given order.

    If `row_indices` is None, return all rollouts. Only the row groups that contain the requested
    rows are read. Without `with_images`, images contain only their size and key.

    Raises:
        ValueError: the file is damaged or has another format version, or an image is missing.
    """
    load = make_image_loader(path.parent) if with_images else lambda name: None
    with _errors_with_path(path):
        file = _open_parquet(path)
        wanted = range(file.metadata.num_rows) if row_indices is None else row_indices
        rollouts = {place: from_record(_row_to_record(row), load) for place, row in _read_rows(file, frozenset(wanted))}
        return [rollouts[place] for place in wanted]


def without_training_columns(rollout: Rollout) -> Rollout:
    """Return a copy of a rollout without the values added during training.

    The values added during training are the token columns computed by models, the advantages, and
    the filter reason.
    """
    empty = {name: [] for name in TOKEN_COLUMNS}
    contexts = [replace(context, **empty) for context in rollout.sequences]
    final = None if rollout.final_state is None else replace(rollout.final_state, **empty)
    return replace(rollout, sequences=contexts, final_state=final, filter_reason="")


@contextmanager
def _errors_with_path(path: Path) -> Iterator[None]:
    """Convert errors about a damaged file into a one-line ValueError with the file's path."""
    try:
        yield
    except _UNREADABLE as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())[:MAX_ERROR_CHARS]}") from error


def _open_parquet(path: Path) -> pq.ParquetFile:
    """Open a step's file without read-ahead.

    A file with more than ROW_GROUP_SIZE rows in a row group is rejected. Without this limit, a
    small file could expand to a huge table, because dictionary encoding stores a repeated text only
    once.

    Raises:
        ValueError: the path is not a regular file, or the file was not written by `write_step`.
    """
    if not is_regular(path):
        raise ValueError("is not a regular file")
    file = pq.ParquetFile(path, pre_buffer=False)
    largest = max((file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)), default=0)
    if largest > ROW_GROUP_SIZE:
        raise ValueError(f"has a row group of {largest} rows, more than {ROW_GROUP_SIZE}: it was not written by this program")
    return file


def _read_rows(file: pq.ParquetFile, row_indices: frozenset[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    first = 0
    for number in range(file.num_row_groups):
        num = file.metadata.row_group(number).num_rows
        inside = sorted(place - first for place in row_indices if first <= place < first + num)
        if inside:
            table = file.read_row_group(number, columns=[name for name in SCHEMA.names if name not in SUMMARY_SCHEMA.names])
            for place, row in zip(inside, table.take(inside).to_pylist(), strict=True):
                yield first + place, row
        first += num


def _to_row(rollout: Rollout) -> dict[str, Any]:
    record = to_record(rollout, lambda image: image_file_name(image.key))
    return record | {name: list(record[name].items()) for name in ("images", "reward_terms")}


def _replace_surrogates(value: Any) -> Any:
    """Replace surrogate characters with question marks, because text files cannot contain them.

    Surrogate characters may occur in the output of a tool.
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {name: _replace_surrogates(each) for name, each in value.items()}
    if isinstance(value, list) and value and not isinstance(value[0], int | float):
        return [_replace_surrogates(each) for each in value]
    return tuple(map(_replace_surrogates, value)) if isinstance(value, tuple) else value


def _row_to_record(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, **{name: dict(row[name]) for name in ("images", "reward_terms")}}
