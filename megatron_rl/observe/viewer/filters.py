"""Filters for the table of rollouts."""

from typing import TYPE_CHECKING, Annotated, Any, cast

import pyarrow as pa
from pyarrow import compute
from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from megatron_rl.observe.viewer.store import RunFolder

pc = cast(Any, compute)  # pyarrow creates these functions when it is imported, so their types are unknown
StepNumber = Annotated[int, Field(ge=0, lt=1 << 62)]


class RolloutFilters(BaseModel):
    """Filters for the rollout table; None and empty values do not filter."""

    step_from: StepNumber | None = None
    step_to: StepNumber | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    source: str = ""
    stop_reason: str = ""
    status: str = ""
    tool: str = ""
    example: str = ""
    stale_from: StepNumber | None = None
    """Minimum staleness of a rollout, in weight updates.

    Staleness is the number of updates from the oldest weights that sampled the rollout to the
    weights at the start of the rollout's step.
    """
    errors_from: StepNumber | None = None
    """Minimum number of tool calls that failed."""
    term: str = ""
    """Name of the reward term to which `term_from` and `term_to` apply."""
    term_from: float | None = None
    term_to: float | None = None
    is_mixed: bool | None = None
    """True for rollouts of groups with different rewards, False for all other rollouts."""
    text: str = ""
    """Text to search for in the questions and the responses, ignoring case."""

    def apply(self, folder: "RunFolder") -> pa.Table:
        """Return the rollouts of a run that pass all filters."""
        table = folder.rollout_table()
        for column, low, high in (("step", self.step_from, self.step_to), ("reward", self.reward_from, self.reward_to)):
            if low is not None:
                table = table.filter(pc.greater_equal(table[column], low))
            if high is not None:
                table = table.filter(pc.less_equal(table[column], high))
        for column, wanted in (
            ("source", self.source),
            ("stop_reason", self.stop_reason),
            ("status", self.status),
            ("example_id", self.example),
        ):
            if wanted:
                table = table.filter(pc.equal(table[column], wanted))
        if self.tool:
            table = table.filter(pa.array([self.tool in tools for tools in table["tools"].to_pylist()], type=pa.bool_()))
        if self.stale_from is not None:
            table = table.filter(pc.greater_equal(compute_staleness(table, folder), self.stale_from))
        if self.errors_from is not None:
            table = table.filter(pc.greater_equal(table["num_errors"], self.errors_from))
        if self.term:
            for compare, bound in ((pc.greater_equal, self.term_from), (pc.less_equal, self.term_to)):
                values = pc.map_lookup(table["reward_terms"], query_key=self.term, occurrence="first")
                table = table.filter(pc.is_valid(values) if bound is None else compare(values, bound))
        if self.is_mixed is not None:
            table = table.filter(pc.equal(find_mixed_groups(folder.rollout_table(), of=table), self.is_mixed))
        if self.text:
            found = [pc.match_substring(pc.fill_null(table[name], ""), self.text, ignore_case=True) for name in ("question", "responses")]
            table = table.filter(pc.or_(*found))
        return table


def compute_staleness(table: pa.Table, folder: "RunFolder") -> pa.ChunkedArray:
    """Return the staleness of each rollout (RolloutFilters.stale_from), 0 with fixed weights."""
    return pc.subtract(table["step"], table["step"] if folder.has_fixed_weights() else table["oldest_version"])


def find_mixed_groups(table: pa.Table, *, of: pa.Table) -> pa.Array:
    """Return for each row of `of` whether the rewards of its group in `table` differ."""
    keys = ["step", "group"]
    extremes = table.group_by(keys).aggregate([("reward", "min"), ("reward", "max")])
    places = of.select(keys).append_column("place", pa.array(range(of.num_rows), pa.int64()))
    joined = places.join(extremes, keys=keys).sort_by("place")  # a join keeps no order
    return pc.fill_null(pc.not_equal(joined["reward_min"], joined["reward_max"]), False).combine_chunks()
