"""Mutants of tools/."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        "a concept is in both splits",
        "tools/data/lewis_rounds.py",
        '("test", names[num:])',
        '("test", names[num - 1 :])',
        "tests/tools/test_make_lewis.py -k both_splits",
    ),
)
