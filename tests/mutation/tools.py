"""Mutants of tools/."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        "the wheel installs packages called tools and sandbox",
        "setup.py",
        'find_packages(include=["megatron_rl*"])',
        'find_packages(include=["megatron_rl*", "sandbox*", "tools*"])',
        "tests/contracts/test_wheel.py -k three",
    ),
    Mutant(
        "a concept is in both splits",
        "tools/data/lewis_rounds.py",
        '("test", names[num:])',
        '("test", names[num - 1 :])',
        "tests/tools/test_make_lewis.py -k both_splits",
    ),
)
