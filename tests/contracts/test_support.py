"""tests/support/README.md lists every helper exactly once and nothing else."""

import re

from tests.conftest import ROOT

SUPPORT = ROOT / "tests" / "support"


def test_every_helper_is_listed_once() -> None:
    rows = [line.split("|")[1] for line in (SUPPORT / "README.md").read_text().splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(path.stem for path in SUPPORT.glob("*.py"))
