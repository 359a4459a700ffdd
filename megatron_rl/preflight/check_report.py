"""What the doctor found, and how it is shown."""

from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table


@dataclass(slots=True)
class Report:
    rows: list[tuple[str, str]] = field(default_factory=list)
    """What was looked at, and what was found."""
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def say(self, what: str, found: str) -> None:
        self.rows.append((what, found))

    def fail(self, what: str, problem: str) -> None:
        self.say(what, "not usable")
        self.errors.append(problem)


def show(report: Report, console: Console) -> None:
    table = Table(show_header=False)
    for row in report.rows:
        table.add_row(*row)
    console.print(table, markup=False)
    for kind, lines in (("warning", report.warnings), ("error", report.errors)):
        for line in lines:
            console.print(f"{kind}: {line}", markup=False, highlight=False, soft_wrap=True)
