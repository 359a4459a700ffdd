"""The page of known failures is that of the table and the markers, and a test of each row runs in
CI.
"""

import re

import pytest

from tests.known_failures.__main__ import DOCUMENT, REPOSITORIES, render_page
from tests.known_failures.failure import Failure
from tests.known_failures.markers import ROOT, MarkedTest, find_marked_tests, read_marked_tests
from tests.known_failures.table import SECTIONS

FAILURES = {name: failure for failures in SECTIONS.values() for name, failure in failures.items()}
REPORT = r"[\w.-]+#\d+"


@pytest.fixture(scope="module")
def marked() -> list[MarkedTest]:
    return find_marked_tests()


def test_the_page_is_that_of_the_markers(marked: list[MarkedTest]) -> None:
    assert render_page(SECTIONS, marked) == DOCUMENT.read_text(), "run python -m tests.known_failures"


def test_every_failure_has_a_test_that_runs_everywhere(marked: list[MarkedTest]) -> None:
    """Tests that are marked gpu, long, skip, skipif or xfail do not count."""
    assert {test.failure for test in marked if not test.restrictions} == FAILURES.keys()


def test_every_marker_has_a_row_and_stands_once(marked: list[MarkedTest]) -> None:
    assert {test.failure for test in marked} <= FAILURES.keys() and len(set(marked)) == len(marked)


def test_rows_are_well_formed() -> None:
    """Reports have the form NAME#NUMBER, names and symptoms are unique, and cells have no bars."""
    assert len(FAILURES) == sum(map(len, SECTIONS.values())) >= 60
    assert len({failure.symptom for failure in FAILURES.values()}) == len(FAILURES)
    unnumbered = {name for name, failure in FAILURES.items() if not re.fullmatch(rf"{REPORT}(, {REPORT})*", failure.seen)}
    assert unnumbered == {"truncated-is-terminated"}
    for name, failure in FAILURES.items():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", name) and not re.search(r"[|\n]", f"{failure.symptom}{failure.seen}{failure.here}")
        assert failure.symptom.endswith(".") and failure.here.endswith(".") and max(len(failure.symptom), len(failure.here)) <= 130
        assert not failure.guide or (ROOT / "docs" / failure.guide).is_file()
    cited = {report.split("#")[0] for failure in FAILURES.values() for report in re.findall(REPORT, failure.seen)}
    assert cited >= REPOSITORIES.keys()


SOURCE = """
import pytest
pytestmark = [pytest.mark.timeout(9)]

@pytest.mark.known_failure("a")
@pytest.mark.known_failure("b")
def test_two() -> None: ...

@pytest.mark.long
@pytest.mark.known_failure("a")
async def test_long() -> None: ...

@pytest.mark.known_failure("c")
class TestAll:
    def helper(self) -> None: ...
    @pytest.mark.skipif(True, reason="no")
    def test_one(self) -> None: ...
"""


def test_what_is_read_from_a_file() -> None:
    """Markers of functions, of a class for each of its tests, and of a module are read."""
    tests = [
        MarkedTest("a", "tests/test_x.py", "test_two"), MarkedTest("b", "tests/test_x.py", "test_two"),
        MarkedTest("a", "tests/test_x.py", "test_long", ("long",)), MarkedTest("c", "tests/test_x.py", "TestAll.test_one", ("skipif",)),
    ]  # fmt: skip
    assert read_marked_tests(SOURCE, "tests/test_x.py") == tests
    whole = SOURCE.replace("[pytest.mark.timeout(9)]", "pytest.mark.gpu")
    assert {test.restrictions for test in read_marked_tests(whole, "tests/test_x.py")} == {("gpu",), ("gpu", "long"), ("gpu", "skipif")}


@pytest.mark.parametrize(
    "source",
    [
        '@pytest.mark.known_failure("a")\ndef helper(): ...',
        '@pytest.mark.known_failure("a")\nclass TestNone: ...',
        "@pytest.mark.known_failure(NAME)\ndef test_x(): ...",
        '@pytest.mark.known_failure("a", "b")\ndef test_x(): ...',
        'x = pytest.param(1, marks=pytest.mark.known_failure("a"))',
    ],
)  # fmt: skip
def test_a_marker_that_marks_nothing_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"^tests/test_x.py: a marker known_failure must have one name in quotes and be on a test"):
        read_marked_tests(source, "tests/test_x.py")


def test_a_row_by_hand() -> None:
    """Reports of known repositories have links, and tests that need more are in parentheses."""
    failures = {"a-b": Failure("Bad.", "verl#1, other#2", "Good.", "data.md")}
    tests = [MarkedTest("a-b", "tests/test_x.py", "test_y"), MarkedTest("a-b", "tests/gpu/test_z.py", "test_z", ("gpu",))]
    row = (
        "| Bad. | [verl#1](https://github.com/verl-project/verl/issues/1), other#2 | Good. [More](data.md) | "
        "[`test_y`](../tests/test_x.py), ([`test_z`](../tests/gpu/test_z.py): gpu) |"
    )
    assert render_page({"Part": failures}, tests).splitlines()[-5:] == [
        "## Part", "", "| symptom | seen in | here | tests |", "|---|---|---|---|", row,
    ]  # fmt: skip
