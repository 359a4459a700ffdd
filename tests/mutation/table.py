"""All mutants: those of each module of this package that has any."""

from importlib import import_module
from pathlib import Path

from tests.mutation.mutant import Mutant

PACKAGES = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in ("__main__", "mutant", "table"))
MUTANTS: tuple[Mutant, ...] = tuple(mutant for package in PACKAGES for mutant in import_module(f"tests.mutation.{package}").MUTANTS)
