"""Reads the data for the viewer page from run directories.

Files and lines that cannot be read are skipped and reported.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, cast

import pyarrow as pa
from pyarrow import compute

from megatron_rl.io.bounded_files import is_regular, read_bytes, read_yaml
from megatron_rl.io.jsonl import iterate_lines, parse_number
from megatron_rl.io.rollout_codec import from_record
from megatron_rl.observe.metrics import MAX_METRICS_BYTES, METRICS_FILE
from megatron_rl.observe.recorder import MAX_IMAGE_BYTES, ROLLOUTS_FOLDER, image_file_name
from megatron_rl.observe.rollout_store import (
    SCHEMA,
    STEP_NAME_PATTERN,
    SUMMARY_SCHEMA,
    list_step_files,
    read_columns,
    read_rollouts,
    step_number,
    step_path,
    summarize_rollout,
)
from megatron_rl.types import Rollout

pc = cast(Any, compute)  # pyarrow creates these functions when it is imported, so their types are unknown
TABLE_COLUMNS = (
    "step", "row_index", "task", "example_id", "source", "group", "sample_index", "reward", "status", "stop_reason", "filter_reason",
    "num_turns", "num_tokens",
    "num_sampled", "num_images", "tools", "num_errors", "oldest_version", "wall_s", "logprob_abs_diff_max", "first_image",
    "reward_terms", "question",
    "answer", "responses", "reason",
)  # fmt: skip
TEXT_COLUMNS = ("question", "answer", "responses", "reason")
"""Columns with texts, which the table shows up to MAX_TEXT_CHARS and cannot sort by."""
TABLE_SCHEMA = pa.schema([SCHEMA.field(name) for name in TABLE_COLUMNS])
MAX_TEXT_CHARS = 400
"""Maximum length in characters of a rollout's text in the rollout table."""
CONFIG, WEIGHTS = "config.yaml", "weights.json"
MAX_FILE_BYTES = 256 << 20
"""Maximum number of bytes read from metrics.jsonl or from a file of best and worst rollouts.

The rest of a larger file is skipped with a note.
"""
MAX_RUN_DEPTH = 3
"""Number of levels below a given folder at which runs are found."""
NUM_READER_THREADS = 4
"""Number of files to read at the same time."""
PNG = b"\x89PNG\r\n\x1a\n"
MAX_LISTED_LINES = 5
"""Maximum number of skipped lines to list by line number."""


@dataclass(slots=True)
class RunFolder:
    """Directory of one run or evaluation.

    Files that have changed are read again, because a run may be in progress.
    """

    path: Path
    _tables: dict[Path, tuple[int, pa.Table]] = field(default_factory=dict)
    _skipped: dict[Path, str] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)
    """Held while tables are read, so that requests at the same time read each file only once."""

    @property
    def skipped(self) -> list[str]:
        """Error messages about the files that could not be read at the last access."""
        return sorted(self._skipped.values())

    def metrics(self) -> list[dict[str, float]]:
        """Return the lines of metrics.jsonl that can be parsed, each with its step."""
        path, found, bad = self.path / METRICS_FILE, [], []
        self._skipped.pop(path, None)
        if not path.exists():
            return []
        try:
            for number, line in iterate_lines(path, max_line_bytes=MAX_METRICS_BYTES, at_most=MAX_FILE_BYTES):
                values = _parse_metrics_line(line)
                found += [values] if values else []
                bad += [] if values else [str(number)]
        except (OSError, ValueError) as error:
            self._skipped[path] = str(error)
            return found
        if bad:
            more = f" and {len(bad) - MAX_LISTED_LINES} more" if len(bad) > MAX_LISTED_LINES else ""
            self._skipped[path] = f"{path} line {', '.join(bad[:MAX_LISTED_LINES])}{more}: is not a step of a run"
        return found

    def rollout_table(self) -> pa.Table:
        """Return a table with one row per rollout.

        The rows of a step come from the rollout store if it contains the step, else from the step's
        best and worst rollouts.
        """
        with self._lock:
            return self._update_table()

    def _update_table(self) -> pa.Table:
        folder = self.path / ROLLOUTS_FOLDER
        banked = {step_number(path): path for path in list_step_files(folder)}
        kept = [path for path in sorted(folder.glob("step_*.jsonl")) if STEP_NAME_PATTERN.fullmatch(path.stem)]
        paths = [*banked.values(), *(path for path in kept if step_number(path) not in banked)]
        for gone in (self._tables.keys() | self._skipped.keys()) - {*paths, self.path / METRICS_FILE}:
            self._tables.pop(gone, None)
            self._skipped.pop(gone, None)
        new = [path for path in paths if path not in self._tables]
        with ThreadPoolExecutor(NUM_READER_THREADS) as readers:  # pyarrow releases the GIL while it reads
            read = dict(zip(new, readers.map(self._read_table, new), strict=True))
        tables = [read[path] if path in read else self._read_table(path) for path in paths]
        return pa.concat_tables([TABLE_SCHEMA.empty_table(), *(each for each in tables if each is not None)])

    def _read_table(self, path: Path) -> pa.Table | None:
        try:
            stamp = path.stat().st_mtime_ns
            if self._tables.get(path, (0,))[0] != stamp:
                banked = path.suffix == ".parquet"
                table, skipped = (read_columns(path, TABLE_COLUMNS).cast(TABLE_SCHEMA), "") if banked else _jsonl_table(path)
                self._tables[path] = (stamp, table)
                self._skipped |= {path: skipped} if skipped else {}
                if not skipped:
                    self._skipped.pop(path, None)
            return self._tables[path][1]
        except (ValueError, OSError, pa.ArrowException, MemoryError) as error:
            self._skipped[path] = " ".join(str(error).split())[:MAX_TEXT_CHARS]
            return None

    def neighbors(self, step: int, row_index: int) -> tuple[list[int] | None, list[int] | None]:
        """Return the positions (step and row) of the previous and of the next rollout.

        Rollouts are ordered by step, then by row within the step. A neighbor that does not exist is
        None.
        """
        table = self.rollout_table().select(["step", "row_index"])
        order = table.take(pc.sort_indices(table, sort_keys=[("step", "ascending"), ("row_index", "ascending")]))
        at = pc.index(pc.and_(pc.equal(order["step"], step), pc.equal(order["row_index"], row_index)), True).as_py()
        neighbors = [order.slice(each, 1).to_pylist() if at >= 0 <= each else [] for each in (at - 1, at + 1)]
        before, after = ([row[0]["step"], row[0]["row_index"]] if row else None for row in neighbors)
        return before, after

    def missing_images(self, keys: Sequence[str]) -> list[str]:
        """Return the keys of the images that have no file."""
        return [key for key in dict.fromkeys(keys) if self._image_path(key) is None]

    def read_image(self, key: str) -> bytes | None:
        """Return the PNG with this image key, or None if the file is missing or not a PNG."""
        path = self._image_path(key)
        try:
            content = read_bytes(path, at_most=MAX_IMAGE_BYTES, follow_link=False) if path else b""
        except (OSError, ValueError):
            return None
        return content if content.startswith(PNG) else None

    def _image_path(self, key: str) -> Path | None:
        """Return the path of the image with this key, or None if there is no such file.

        Symbolic links are not followed, because they may point to any file that the user can read.
        """
        path = self.path / ROLLOUTS_FOLDER / image_file_name(key)
        is_inside = path.parent.resolve().is_relative_to(self.path.resolve())
        return path if is_inside and is_regular(path, follow_link=False) else None

    def load_rollouts(self, step: int, is_wanted: Callable[[Mapping[str, Any]], bool]) -> list[tuple[int, Rollout]]:
        """Return the selected rollouts of a step without pixels, each with its row index.

        Raises:
            ValueError: the rollouts cannot be read.
        """
        path = step_path(self.path / ROLLOUTS_FOLDER, step)
        if is_regular(path):
            rows = read_columns(path, ["row_index", "group", "sample_index"]).to_pylist()
            places = [row["row_index"] for row in rows if is_wanted(row)]
            return list(zip(places, read_rollouts(path, places, with_images=False), strict=True))
        lines = self.path / ROLLOUTS_FOLDER / f"step_{step:06d}.jsonl"
        if not is_regular(lines):
            raise ValueError(f"{self.path}: no rollout of step {step} is stored")
        found, _ = _read_jsonl_rollouts(lines)
        return [
            (row_index, each)
            for row_index, each in found
            if is_wanted({"row_index": row_index, "group": each.group, "sample_index": each.sample_index})
        ]

    def model_path(self) -> str:
        """Return the path of the model, which may contain the tokenizer, or "" if it is unknown."""
        path = self._read_setting("model", "path")
        return path if isinstance(path, str) else ""

    def has_fixed_weights(self) -> bool:
        """Return True if a single set of weights generated all rollouts.

        Evaluations and rollout-only runs have fixed weights.
        """
        return (self.path / WEIGHTS).is_file() or self._read_setting("run", "mode") == "rollout_only"

    def _read_setting(self, group: str, name: str) -> object:
        """Return a setting of the run's configuration, or None if it is unknown."""
        try:
            return read_yaml(self.path / CONFIG)[group][name]
        except (OSError, ValueError, TypeError, KeyError):
            return None


def _parse_metrics_line(line: bytes) -> dict[str, float] | None:
    try:
        values = {name: parse_number(value) for name, value in json.loads(line).items()}
        return {"step": values.pop("step"), **values} if math.isfinite(values["step"]) else None
    except (ValueError, AttributeError, KeyError, RecursionError):
        return None


def _read_jsonl_rollouts(path: Path) -> tuple[list[tuple[int, Rollout]], str]:
    """Return the rollouts in a file with their line indices, and the last error message.

    Lines that cannot be parsed are skipped. The message is "" if there was no error.
    """
    found, skipped = [], ""
    try:
        for number, line in iterate_lines(path, at_most=MAX_FILE_BYTES):
            try:
                found.append((number - 1, from_record(json.loads(line)["rollout"], lambda name: None)))
            except (ValueError, KeyError, TypeError, RecursionError, MemoryError) as error:
                skipped = f"{path} line {number}: {' '.join(str(error).split())[:MAX_TEXT_CHARS]}"
    except ValueError as error:
        skipped = str(error)
    return found, skipped


def _jsonl_table(path: Path) -> tuple[pa.Table, str]:
    found, skipped = _read_jsonl_rollouts(path)
    fields = [name for name in TABLE_COLUMNS if name not in SUMMARY_SCHEMA.names]
    rows = [
        {name: getattr(rollout, name) for name in fields} | summarize_rollout(rollout, step=step_number(path), row_index=place)
        for place, rollout in found
    ]
    plain = [
        {**row, "status": str(row["status"]), "stop_reason": str(row["stop_reason"]), "reward_terms": list(row["reward_terms"].items())}
        for row in rows
    ]
    return pa.Table.from_pylist(
        [{name: replace_surrogates(value) for name, value in row.items()} for row in plain], schema=TABLE_SCHEMA
    ), skipped


def replace_surrogates(value: object) -> object:
    """Replace the surrogate characters in a text, because JSON and Parquet cannot contain them."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def page_rows(table: pa.Table, *, sort: str, descending: bool, offset: int, limit: int) -> list[dict[str, Any]]:
    """Return one page of a table, sorted by a column and then by step and row.

    Texts are cut to MAX_TEXT_CHARS.
    """
    keys = [(sort, "descending" if descending else "ascending"), *((name, "ascending") for name in ("step", "row_index") if name != sort)]
    index = pc.sort_indices(table.select([name for name, _ in keys]), sort_keys=keys)[offset : offset + limit]
    return [{**row, **{name: row[name][:MAX_TEXT_CHARS] for name in TEXT_COLUMNS}} for row in plain_rows(table.take(index))]


def plain_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return the rows of a table as plain values, with "" for a missing text."""
    return [
        {**row, **{name: row[name] or "" for name in TEXT_COLUMNS}, "reward_terms": dict(row["reward_terms"] or ())}
        for row in table.to_pylist()
    ]


def find_runs(path: Path, depth: int = MAX_RUN_DEPTH) -> list[Path]:
    """Return the folder itself if it is the directory of a run, else the runs below it.

    At most `depth` levels are searched. Symbolic links and the contents of runs are not searched.
    """
    if any((path / name).exists() for name in (METRICS_FILE, CONFIG, ROLLOUTS_FOLDER)):
        return [path]
    folders = sorted(each for each in path.iterdir() if each.is_dir() and not each.is_symlink()) if depth else []
    return [run for folder in folders for run in find_runs(folder, depth - 1)]


def label_folders(paths: Sequence[Path]) -> dict[str, RunFolder]:
    """Return the run directories, keyed by their labels on the page.

    A label is the end of a path. All labels have the same number of path components, which is the
    smallest number that makes them unique.
    """
    absolute = [path.resolve() for path in dict.fromkeys(paths)]
    num = 1
    while len({"/".join(path.parts[-num:]) for path in absolute}) < len(set(absolute)):
        num += 1
    return {"/".join(path.parts[-num:]): RunFolder(path) for path in absolute}
