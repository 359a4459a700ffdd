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
    Mutant(
        "a picture has one nested square less than its answer",
        "tools/data/geometry_scenes.py",
        "for _ in range(int(answer)):",
        "for _ in range(int(answer) - 1):",
        "tests/tools/test_make_geometry.py -k pixels_show",
    ),
    Mutant(
        "circles that should overlap are apart",
        "tools/data/geometry_scenes.py",
        '(1 if answer == "No" else -1)',
        '(1 if answer == "Yes" else -1)',
        "tests/tools/test_make_geometry.py -k pixels_show",
    ),
    Mutant(
        "held-out pictures are those of the training data",
        "tools/data/make_geometry.py",
        'random.Random(f"{seed} {split} {index}")',
        'random.Random(f"{seed} {index}")',
        "tests/tools/test_make_geometry.py -k share_no_picture",
    ),
)
