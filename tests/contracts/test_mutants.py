"""The table of mutants matches the code: each mutant can be applied, and the tests that it names
exist.
"""

import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.mutation.__main__ import copy_tree
from tests.mutation.mutant import Mutant
from tests.mutation.table import MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_can_be_planted(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1 and mutant.new != mutant.old
    words = mutant.tests.split(" ")
    files = [word for word in words if word.startswith("tests/")]
    assert files and all((ROOT / file.split("::")[0]).exists() for file in files)
    text = "".join((ROOT / file.split("::")[0]).read_text() for file in files)
    assert all(word in text for file in files for word in file.split("::")[1:])
    assert "-k" not in words or words[words.index("-k") + 1] in text


def test_the_copy_is_complete(tmp_path: Path) -> None:
    """Without megatron_rl/configs, which is a link, tests would fail whatever was planted."""
    copy_tree(tmp_path)
    assert (tmp_path / "megatron_rl" / "configs" / "train.yaml").is_file()
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(tracked) > 500 and [name for name in tracked if (ROOT / name).exists() and not (tmp_path / name).exists()] == []


def test_the_table_is_long_enough() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
