"""Finds markers of known failures in test files, without importing them."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAME = "known_failure"
RESTRICTIONS = ("gpu", "long", "skip", "skipif", "xfail")
"""Markers of tests that do not run everywhere: such a test alone does not cover a failure."""


@dataclass(frozen=True, slots=True)
class MarkedTest:
    """A test that fails if the program has a known failure."""

    failure: str
    """Name of the failure in the table."""
    file: str
    """Path of the test file from the root of the repository."""
    test: str
    """Name of the test function, with its class if it has one."""
    restrictions: tuple[str, ...] = ()
    """Markers of RESTRICTIONS that the test, its class or its module has."""


@dataclass(frozen=True, slots=True)
class Marker:
    """A decorator `@pytest.mark.NAME(ARGUMENT)`."""

    name: str
    argument: str
    """The only argument, or "" if there is none, several, or one that is no text."""
    line: int


def find_marked_tests(root: Path = ROOT) -> list[MarkedTest]:
    """Return all marked tests, sorted by file and in the order of the file.

    Raises:
        ValueError: A marker is on something other than a test, or has no name in quotes.
    """
    sources = {str(path.relative_to(root)): path.read_text() for path in sorted((root / "tests").rglob("test_*.py"))}
    return [found for file, source in sources.items() if f"mark.{NAME}(" in source for found in read_marked_tests(source, file)]


def read_marked_tests(source: str, file: str) -> list[MarkedTest]:
    """Return the marked tests in the source of a test file."""
    tree = ast.parse(source)
    module = [_read_marker(each) for node in tree.body if isinstance(node, ast.Assign) for each in _module_markers(node)]
    found = list(_find_in(tree.body, file, module, prefix=""))
    lines = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == NAME}
    if lines != {line for line, _ in found}:
        raise ValueError(f'{file}: a marker {NAME} must have one name in quotes and be on a test, as @pytest.mark.{NAME}("NAME")')
    return [test for _, test in found]


def _module_markers(node: ast.Assign) -> list[ast.expr]:
    if not any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets):
        return []
    return node.value.elts if isinstance(node.value, ast.List) else [node.value]


def _read_marker(node: ast.expr) -> Marker:
    name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    arguments = node.args if isinstance(node, ast.Call) else []
    value = arguments[0].value if len(arguments) == 1 and isinstance(arguments[0], ast.Constant) else ""
    return Marker(name.removeprefix("pytest.mark."), value if isinstance(value, str) else "", node.lineno)


def _find_in(body: list[ast.stmt], file: str, inherited: list[Marker], *, prefix: str) -> Iterator[tuple[int, MarkedTest]]:
    """Yield the line of each marker with each test that it marks."""
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        markers = [*inherited, *map(_read_marker, node.decorator_list)]
        if isinstance(node, ast.ClassDef):
            yield from _find_in(node.body, file, markers, prefix=f"{node.name}.")
        elif node.name.startswith("test_"):
            restrictions = tuple(sorted({marker.name for marker in markers if marker.name in RESTRICTIONS}))
            for marker in markers:
                if marker.name == NAME and marker.argument:
                    yield marker.line, MarkedTest(marker.argument, file, f"{prefix}{node.name}", restrictions)
