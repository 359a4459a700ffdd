"""The index of the examples names every file, and every file has a test that starts it."""

import re

from tests.conftest import ROOT

EXAMPLES = ROOT / "examples"
MAX_PICTURE_BYTES = 400_000
FILES = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".yaml", ".ipynb"))


def test_every_example_is_in_the_index_and_tested() -> None:
    index, tests = ((ROOT / name).read_text() for name in ("examples/README.md", "tests/examples/test_examples.py"))
    assert len(FILES) == 13
    assert [name for name in FILES if f"]({name})" not in index or f"examples/{name}" not in index] == []
    assert [name for name in FILES if f'"{name}"' not in tests and f'"{name.removesuffix(".py")}"' not in tests] == []


def test_pictures_are_small_and_used() -> None:
    pictures = [path for path in EXAMPLES.rglob("*") if path.suffix in (".png", ".svg")]
    used = set(re.findall(r"!\[[^\]]+\]\(pictures/([^)]+)\)", (EXAMPLES / "README.md").read_text()))
    assert pictures and {path.name for path in pictures} == used
    assert sum(path.stat().st_size for path in pictures) <= MAX_PICTURE_BYTES
