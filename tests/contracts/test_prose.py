"""Style rules for docstrings and comments that ruff cannot check: their first word and a maximum of
100 columns per line.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT

FOLDERS = ("megatron_rl", "sandbox", "tools")
MAX_COLUMNS = 100
FRAGMENT = re.compile(r"(What|Of|Who|Whose|Whether|Where|By)\b")


def docstrings(source: str) -> Iterator[ast.Constant]:
    """Yield all string statements: docstrings of modules, classes, functions and fields."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def find_fragments(source: str) -> list[str]:
    return [f"{found.lineno}: {found.value[:40]}" for found in docstrings(source) if FRAGMENT.match(found.value.strip())]


def find_long_lines(source: str) -> list[str]:
    lines = source.splitlines()
    rows = {row for found in docstrings(source) for row in range(found.lineno, found.end_lineno + 1)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            rows.add(token.start[0])
    return [f"{row}: {len(lines[row - 1])} columns" for row in sorted(rows) if len(lines[row - 1]) > MAX_COLUMNS]


@pytest.mark.parametrize("folder", FOLDERS)
def test_prose_follows_the_style_guide(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    found = {
        str(path.relative_to(ROOT)): lines for path in paths if (lines := find_fragments(text := path.read_text()) + find_long_lines(text))
    }
    assert len(paths) > 10 and not found


@pytest.mark.parametrize(
    ("source", "num_fragments", "num_long"),
    [
        ('def f():\n    """Return one."""\n', 0, 0),
        ('def f():\n    """Of a rank."""\n', 1, 0),
        ('class A:\n    x: int\n    """\n    Whether it is so.\n    """\n', 1, 0),
        (f'"""A module.\n\n{"words " * 20}.\n"""\n', 0, 1),
        (f"# {'words ' * 20}\nx = 1  # {'words ' * 20}\n", 0, 1),
        ("x = 'Of a rank, and what is more'\n", 0, 0),
    ],
)
def test_what_is_found(source: str, num_fragments: int, num_long: int) -> None:
    assert (len(find_fragments(source)), len(find_long_lines(source))) == (num_fragments, num_long)
