"""What the doctor found, and how it is shown."""

from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table


@dataclass(slots=True)
class CheckReport:
    findings: list[tuple[str, str]] = field(default_factory=list)
    """What was looked at, and what was found."""
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add_finding(self, name: str, result: str) -> None:
        self.findings.append((name, result))

    def add_failure(self, name: str, error: str) -> None:
        self.add_finding(name, "not usable")
        self.errors.append(error)


def print_report(report: CheckReport, console: Console) -> None:
    table = Table(show_header=False)
    for row in report.findings:
        table.add_row(*row)
    console.print(table, markup=False)
    for kind, lines in (("warning", report.warnings), ("error", report.errors)):
        for line in lines:
            console.print(f"{kind}: {line}", markup=False, highlight=False, soft_wrap=True)
