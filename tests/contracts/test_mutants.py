"""The table of mutants matches the code: each mutant can be applied, and the tests that it names
exist.
"""

import pytest

from tests.conftest import ROOT
from tests.mutation.mutant import Mutant
from tests.mutation.table import MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_can_be_planted(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1 and mutant.new != mutant.old
    files = [word for word in mutant.tests.split(" ") if word.startswith("tests/")]
    assert files and all((ROOT / file.split("::")[0]).exists() for file in files)


def test_the_table_is_long_enough() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
