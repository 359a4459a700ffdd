"""Mutants of tools/."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        "episodes that are not solved are demonstrations",
        "tools/data/make_gymnasium.py",
        "if episode.is_solved or given.all:",
        "if episode.turns or given.all:",
        "tests/tools/test_make_gymnasium.py -k only_solved",
    ),
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
