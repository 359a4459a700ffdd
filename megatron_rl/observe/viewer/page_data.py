"""Data of each view of the page, as JSON values. The web server and the static export use it."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, Literal, cast

from pyarrow import compute
from pydantic import Field

from megatron_rl.io.bounded_files import is_regular
from megatron_rl.observe.viewer.filters import RolloutFilters
from megatron_rl.observe.viewer.overview import make_example_rows
from megatron_rl.observe.viewer.rollout_records import episode_record, image_record, member_record, prompt_images
from megatron_rl.observe.viewer.store import TABLE_COLUMNS, TEXT_COLUMNS, RunFolder, page_rows, replace_surrogates
from megatron_rl.observe.viewer.token_decoder import TokenDecoder
from megatron_rl.types import Rollout

pc = cast(Any, compute)  # pyarrow creates these functions when it is imported, so their types are unknown
SORTABLE_COLUMNS = tuple(name for name in TABLE_COLUMNS if name not in ("tools", "first_image", "reward_terms", *TEXT_COLUMNS))
if TYPE_CHECKING:
    SortColumn = str
else:
    SortColumn = Literal[SORTABLE_COLUMNS]
HIDDEN_IF_CONSTANT = (
    "source", "sample_index", "status", "stop_reason", "num_turns", "num_images", "num_errors", "oldest_version", "logprob_abs_diff_max",
    "question", "answer", "reason",
)  # fmt: skip
"""Columns that the table leaves out if all rollouts of the run have the same value."""
MAX_ROWS = 500
TOKENIZER_FILE = "tokenizer.json"


class RolloutPageQuery(RolloutFilters):
    """Request for one page of the rollout table."""

    run: str
    sort: SortColumn = "step"
    descending: bool = False
    offset: int = Field(0, ge=0)
    limit: int = Field(50, ge=1, le=MAX_ROWS)


class DecoderCache:
    """Cache of the token decoder of each run.

    The tokenizer comes from the run's initial model, else from its final model, else from the run
    directory itself. A tokenizer file that has changed is read again.
    """

    def __init__(self) -> None:
        self._found: dict[Path, tuple[tuple[Path, int, int], TokenDecoder]] = {}

    def get_decoder(self, folder: RunFolder) -> TokenDecoder | None:
        """Return the decoder of a run, or None if the run has no tokenizer."""
        model = folder.model_path()
        places = [*([Path(model)] if model else []), folder.path / "final", folder.path]
        file = next((each / TOKENIZER_FILE for each in places if is_regular(each / TOKENIZER_FILE)), None)
        if file is None:
            return None
        stamp = (file, file.stat().st_mtime_ns, file.stat().st_size)
        if folder.path not in self._found or self._found[folder.path][0] != stamp:
            if folder.path in self._found:
                self._found.pop(folder.path)[1].close()
            self._found[folder.path] = (stamp, TokenDecoder(file))
        return self._found[folder.path][1]

    def close(self) -> None:
        """End the processes of all decoders."""
        for _, decoder in self._found.values():
            decoder.close()


def run_summary(name: str, folder: RunFolder) -> dict[str, Any]:
    """Return the size of a run, and the values for which its table can be filtered.

    Reward terms that are 0 in every rollout are left out.
    """
    table, metrics = folder.rollout_table(), folder.metrics()
    ends, sources = (sorted(filter(None, pc.unique(table[name]).to_pylist())) for name in ("stop_reason", "source"))
    tools = sorted(pc.unique(pc.list_flatten(table["tools"])).to_pylist())
    last = max((int(line["step"]) for line in metrics), default=None)
    chunks = table["reward_terms"].chunks
    terms = sorted({name for chunk in chunks for name in pc.unique(chunk.keys.filter(pc.not_equal(chunk.items, 0.0))).to_pylist()})
    rewards = pc.min_max(table["reward"]).as_py()
    constant = [each for each in HIDDEN_IF_CONSTANT if pc.count_distinct(table[each], mode="all").as_py() <= 1]
    constant += [] if pc.any(pc.not_equal(table["first_image"], "")).as_py() else ["first_image"]
    return to_json_value({
        "name": name, "rollouts": table.num_rows, "last_step": last, "stop_reasons": ends, "tools": tools, "terms": terms,
        "sources": sources[:MAX_ROWS],
        "skipped": folder.skipped, "constant": constant, "rewards": [rewards["min"], rewards["max"]],
    })  # fmt: skip


def curve_lines(folder: RunFolder) -> list[dict[str, float | None]]:
    """Return the metrics of every step."""
    return to_json_value(folder.metrics())


def rollout_page(query: RolloutPageQuery, folder: RunFolder) -> dict[str, Any]:
    """Return one page of the rollout table, and the number of rollouts on all pages."""
    table = query.apply(folder)
    rows = page_rows(table, sort=query.sort, descending=query.descending, offset=query.offset, limit=query.limit)
    return to_json_value({"total": table.num_rows, "rows": rows, "skipped": folder.skipped})


def example_rows(folder: RunFolder) -> list[dict[str, Any]]:
    """Return one row per example, lowest mean reward first."""
    return to_json_value(make_example_rows(folder, limit=MAX_ROWS))


def group_data(folder: RunFolder, step: int, group: int) -> dict[str, Any]:
    """Return the members of a group, with the mean and standard deviation of their rewards.

    Raises:
        ValueError, OSError, KeyError: the rollouts of the step cannot be read.
    """
    return describe_group(folder.load_rollouts(step, lambda row: row["group"] == group))


def describe_group(members: Sequence[tuple[int, Rollout]]) -> dict[str, Any]:
    """Return the page's data of a group, given its members with their row indices."""
    rewards = [rollout.reward for _, rollout in members if rollout.reward is not None]
    figures = {"mean": fmean(rewards), "std": pstdev(rewards)} if rewards else {"mean": None, "std": None}
    first = members[0][1] if members else None
    shown = {} if first is None else {
        "question": first.question, "answer": first.answer, "first": [image_record(image) for image in prompt_images(first)],
    }  # fmt: skip
    return to_json_value({**figures, **shown, "members": [member_record(row_index, rollout) for row_index, rollout in members]})


def episode_data(folder: RunFolder, step: int, row_index: int, decoder: TokenDecoder | None) -> dict[str, Any]:
    """Return an episode, the previous and the next episode, and the keys of missing images.

    Raises:
        ValueError, OSError, KeyError: there is no such rollout, or it cannot be read.
    """
    found = folder.load_rollouts(step, lambda row: row["row_index"] == row_index)
    if not found:
        raise ValueError(f"step {step} has no rollout {row_index}")
    return describe_episode(folder, found[0][1], decoder, folder.neighbors(step, row_index))


def describe_episode(
    folder: RunFolder, rollout: Rollout, decoder: TokenDecoder | None, neighbors: Sequence[list[int] | None]
) -> dict[str, Any]:
    """Return the data of an episode, given its rollout and neighbors (RunFolder.neighbors)."""
    before, after = neighbors
    missing = folder.missing_images([image.key for image in rollout.images])
    return to_json_value({**episode_record(rollout, decoder), "before": before, "after": after, "missing": missing})


def to_json_value(value: Any) -> Any:
    """Replace NaN and infinities, which JSON cannot represent, with None."""
    if isinstance(value, Mapping):
        return {name: to_json_value(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else replace_surrogates(value)
