"""Groups the problems found in rows and columns, and formats one line per group.

Rows with the same problem share one line.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_rl.data.columns import MissingColumn, missing_remedy
from megatron_rl.data.unread import UnreadFinding

MAX_LINES = 20
"""Maximum number of different problems that get a line each.

Rows with further problems are counted but not listed.
"""
_WHERE = re.compile(r"(.*?) row (\d+): (.*)", re.DOTALL)


@dataclass(slots=True)
class _Group:
    """Rows with the same problem."""

    first: str
    """Label of the first row with the problem, such as `row 17`."""
    hint: str = ""
    num_rows: int = 0
    files: dict[str, None] = field(default_factory=dict)
    columns: dict[str, None] = field(default_factory=dict)
    """Column names of the rows, listed in the line about a missing column."""


class ProblemLines:
    """Problems grouped by kind.

    Problems are of the same kind in any of these cases:

    - They are about the same missing column.
    - They are equal findings.
    - Their messages differ only in the row number.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        """Number of rows with a problem; a row with two problems counts twice."""
        self._groups: dict[str | UnreadFinding | tuple[str, str], _Group] = {}

    def add_error(self, error: ValueError) -> None:
        """Add an error about a row; errors of type MissingColumn are grouped by column."""
        if not isinstance(error, MissingColumn):
            return self.add_message(str(error))
        group = self._add(error.name, error.where, hint=error.hint)
        if group:
            group.columns |= dict.fromkeys(error.columns)
        return None

    def add_message(self, message: str) -> None:
        """Add a message, which may begin with a file and a row, such as `train.jsonl row 3`."""
        found = _WHERE.fullmatch(message)
        self._add((found[1], found[3]) if found else ("", message), message.partition(": ")[0])

    def add_finding(self, finding: UnreadFinding, where: str) -> None:
        """Add a finding about the row at `where`."""
        self._add(finding, where)

    def format_lines(self, num_rows_of: Mapping[str, int]) -> list[str]:
        """Return one line per kind of problem, with lines about columns first.

        Args:
            num_rows_of: number of rows per file, used to detect problems that all rows have.
        """
        columns_first = sorted(self._groups.items(), key=lambda item: isinstance(item[0], tuple))
        return [_line(problem, group, sum(num_rows_of.get(file, 0) for file in group.files)) for problem, group in columns_first]

    def move_errors_in_all_rows(self, others: "ProblemLines", num_rows_of: Mapping[str, int]) -> None:
        """Move the findings that count as errors from `others` to this object.

        A finding counts as an error if `is_error_in_all` is set and every row in the affected files
        has the finding.
        """
        for problem, group in [*others._groups.items()]:
            is_all = 1 < group.num_rows == sum(num_rows_of.get(file, 0) for file in group.files)
            if isinstance(problem, UnreadFinding) and problem.is_error_in_all and is_all:
                self._groups[problem] = others._groups.pop(problem)
                self.num_rows, others.num_rows = self.num_rows + group.num_rows, others.num_rows - group.num_rows

    def num_omitted_rows(self) -> int:
        """Return the number of rows with problems that are not listed."""
        return self.num_rows - sum(group.num_rows for group in self._groups.values())

    def _add(self, problem: str | UnreadFinding | tuple[str, str], where: str, *, hint: str = "") -> _Group | None:
        """Count a row with a problem; return the problem's group, or None if the list is full."""
        self.num_rows += 1
        file, _, row = where.rpartition(" row ")
        group = self._groups.get(problem)
        if group is None and len(self._groups) < MAX_LINES:
            group = self._groups[problem] = _Group(f"row {row}", hint)
        if group is not None:
            group.num_rows += 1
            group.files[file] = None
        return group


def _line(problem: str | UnreadFinding | tuple[str, str], group: _Group, num_rows: int) -> str:
    file = next(iter(group.files))
    is_all = num_rows == group.num_rows > 1
    others = f" (and {len(group.files) - 1} more files)" if len(group.files) > 1 else ""
    start = f"{file}{others}" if is_all else f"{file} {group.first}{others}"
    more = f" (and {group.num_rows - 1} more rows)" if group.num_rows > 1 else ""
    if isinstance(problem, UnreadFinding):
        rows = "" if num_rows == group.num_rows else f" ({group.num_rows} of {num_rows} rows)"
        return f"{start}: column {problem.column} {problem.description}{rows}: {problem.remedy}"
    if isinstance(problem, str):
        remedy = missing_remedy(problem, group.columns, group.hint)
        return f"{start}: no {problem} (all {num_rows} rows). {remedy}" if is_all else f"{start}: {problem}: is missing{more}. {remedy}"
    if not file:
        return problem[1]
    return f"{file} {group.first}: {problem[1]}" + (f" (all {num_rows} rows)" if is_all else more)
