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
    is_mixed: bool = False
    """If set, only rollouts of groups with different rewards."""
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
            behind = pc.subtract(table["step"], table["step"] if folder.has_fixed_weights() else table["oldest_version"])
            table = table.filter(pc.greater_equal(behind, self.stale_from))
        if self.errors_from is not None:
            table = table.filter(pc.greater_equal(table["num_errors"], self.errors_from))
        if self.is_mixed:
            table = table.filter(find_mixed_groups(folder.rollout_table(), of=table))
        if self.text:
            found = [pc.match_substring(pc.fill_null(table[name], ""), self.text, ignore_case=True) for name in ("question", "responses")]
            table = table.filter(pc.or_(*found))
        return table


def find_mixed_groups(table: pa.Table, *, of: pa.Table) -> pa.Array:
    """Return for each row of `of` whether the rewards of its group in `table` differ."""
    extremes = table.group_by(["step", "group"]).aggregate([("reward", "min"), ("reward", "max")]).to_pylist()
    mixed = {(row["step"], row["group"]) for row in extremes if row["reward_min"] != row["reward_max"]}
    groups = zip(of["step"].to_pylist(), of["group"].to_pylist(), strict=True)
    return pa.array([each in mixed for each in groups], type=pa.bool_())
