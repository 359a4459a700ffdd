"""One row of the mutation table."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    file: str
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    tests: str
    """Arguments for pytest: files that take seconds, with -k to select one test."""
