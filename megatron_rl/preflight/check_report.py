"""Report of the doctor's checks, and its output on the console."""

from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table


@dataclass(slots=True)
class CheckReport:
    """Findings, errors and warnings of the doctor's checks."""

    findings: list[tuple[str, str]] = field(default_factory=list)
    """Pairs (checked item, result of the check)."""
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add_finding(self, name: str, result: str) -> None:
        """Add the result of a check to the findings."""
        self.findings.append((name, result))

    def add_failure(self, name: str, error: str) -> None:
        """Add an error, and a finding that the item is not usable."""
        self.add_finding(name, "not usable")
        self.errors.append(error)


def print_report(report: CheckReport, console: Console) -> None:
    """Print the findings as a table, then warnings and errors as lines."""
    table = Table(show_header=False)
    for row in report.findings:
        table.add_row(*row)
    console.print(table, markup=False)
    for kind, lines in (("warning", report.warnings), ("error", report.errors)):
        for line in lines:
            console.print(f"{kind}: {line}", markup=False, highlight=False, soft_wrap=True)
