"""Tests algebra: its verdicts against hand-decided cases, the cases that it leaves undecided, and
the death of its helper process."""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.errors import InfraError
from megatron_rl.rewards.algebra import MathVerifier, is_mathematics

CASES = [
    ("1/2", "0.5", True),
    ("\\frac{1}{2}", "$1/2$", True),
    ("\\sqrt{8}", "2\\sqrt{2}", True),
    ("2x+1", "1+2x", True),
    ("50\\%", "0.5", True),
    ("[1, 2)", "[1,2)", True),
    ("\\{1, 2\\}", "\\{2, 1\\}", True),
    ("12", "x = 12", True),
    ("90^\\circ", "90", True),
    ("2x + 6", "2(x+3)", True),
    ("y = 2k + 1", "1 + 2k", True),
    ("3x^2", "x \\cdot 3 x", True),
    ("3m + 1", "1 + 3m", True),
    ("50\\%", "\\frac{1}{2}", True),
    ("S_{10} = 55", "55", True),
    ("1\\frac{1}{2}", "1.5", True),
    ("t \\le 5", "5 \\ge t", True),
    ("x+2t", "x+2", False),  # math-verify's list of units contains t
    ("3x", "3y", False),
    ("1/2", "0.51", False),
    ("3", "3, 4", False),
    ("3", "3 or 4", False),
    ("3", "\\{3, 4\\}", False),
    ("3", "\\pm 3", False),
    ("2", "1=2=12", None),
    ("1=1", "2=2", None),
    ("3", "1 1/2", False),
    ("1.5", "1 1/2", True),
    ("-0.5", "-\\frac{1}{2}", True),
    ("-2\\sqrt{2}", "-\\sqrt{8}", True),
    ("-\\frac{1}{5000000}", "-0.0000001", False),
    ("1e9", "9e1", False),
    ("6", "(2)(3)", True),
    ("5", "(2)(3)", False),
    ("12", "3(4)", True),
    ("7", "3(4)", False),
    ("7", "3\\left(4\\right)", False),
    ("7", "3\\binom{4}{1}", False),
    ("12", "3\\binom{4}{1}", True),
    ("7", "3\\max(4,4)", False),
    ("7", "3[4]", None),
    ("7", "{3}(4)", None),
    ("5", "\\frac{4}{2}3", False),
    ("6", "\\frac{4}{2}3", True),
    ("5=x", "5", True),
    ("5=x", "6", False),
    ("2", "log_10(100)", True),
    ("3", "log_2(8)", True),
    ("5", "--5", None),
    ("5", "101_2", None),
    ("5'", "5''", None),
    ("0.0000001", "\\frac{1}{5000000}", False),
    ("(2,1)", "1,2", False),
    ("1<x<2", "(1,2)", True),
    ("2\\sqrt{3}/3", "2/sqrt(3)", True),
    ("x^{10}", "x**10", True),
    ("\\frac{\\pi}{2}", "\u03c0/2", True),
    ("x \\le 5", "x <= 5", True),
    ("45^\\circ", "45 degrees", True),
    ("50\\%", "50 percent", True),
    ("\\frac{dy}{dx}", "0", None),
    ("f(2)=4", "f(2)=100", None),
    ("x^2=-1", "x^2=-4", None),
    ("2", "\\lim_{x\\to1}\\frac{x^2-1}{x-1}", None),
    ("\\frac{1}{0}", "\\frac{2}{0}", None),
    ("5", "9^{9^{9^{9}}}", None),  # more digits than there are atoms
    ("5", "100000000!", None),
    ("5", "\\frac" * 30, None),
    ("5", "((((((5", None),
    ("5", "\x00 5", None),
    ("5", "\ud800 5", None),
]


def test_algebra() -> None:
    """All cases are decided at once, with questions among them that would never end, and from more
    than one event loop."""

    async def ask(cases: list[tuple[str, str, bool | None]]) -> list[bool | None]:
        return list(await asyncio.gather(*(algebra.is_equal(truth, answer) for truth, answer, _ in cases)))

    algebra = MathVerifier()
    for cases in (CASES, CASES[:3]):
        assert asyncio.run(ask(cases)) == [expected for *_, expected in cases]


STATEMENTS = ["x^2<-1", "x^2+1<0", "(x-1)^2<-2", "x^2>-1", "x^2+4>0", "x^2=-1", "x=x+1", "x^2<4", "x>3", "x^2>1", "x=5", "x^2=4"]


def test_statements_that_always_or_never_hold() -> None:
    """A statement counts as always or never true exactly if its truth is the same at every multiple
    of 1/2 from -20 to 20. Statements are parsed by math-verify."""
    from math_verify import parse
    from sympy import Rational

    from megatron_rl.rewards.parsed_math import is_always_or_never_true

    for text in STATEMENTS:
        relation = parse(f"${text}$", fallback_mode="no_fallback", parsing_timeout=None)[0]
        (unknown,) = relation.free_symbols
        held = {bool(relation.subs(unknown, Rational(half, 2))) for half in range(-40, 41)}
        assert is_always_or_never_true(relation) == (len(held) == 1), text


QUANTITIES = [
    *[("5 km", "5 m"), ("5 m", "5 cm"), ("3 kg", "3 g"), ("12 lb", "12 kg"), ("100 m", "100 ft"), ("5 hr", "5 s"), ("5 km", "5")],
    *[("5\\text{ m}", "5\\text{ km}"), ("5 \\mathrm{~m}", "5\\mathrm{cm}"), ("5\\,\\text{m}", "5"), ("5~m", "5"), ("-5 m", "-5 km")],
    *[("7 pm", "7 am"), ("7:30 pm", "7:30 am"), ("5\\text{ m}^2", "5\\text{ m}^3"), ("30 mph", "30"), ("37^\\circ\\text{C}", "37")],
    *[("12 ft", "12 tf"), ("5 km/h", "5 mk/h"), ("\\frac{1}{2} kg", "0.5"), ("5 - 3 mg", "5 - 3 gm"), ("5 in", "5"), ("d = 5 m", "5")],
]
CODES = [
    *[("A12", "12A"), ("K7", "7K"), ("B2", "2B"), ("No 7", "7 No"), ("No. 7", "7 No."), ("K7B", "KB7"), ("A1B2", "B2A1"), ("x3", "3x")],
    *[("K7-2", "7K-2"), ("\\text{A}12", "12\\text{A}"), ("v2.1", "2.1v"), ("3D", "D3"), ("N 45", "45 N")],
    *[("3 x 4", "4 x 3"), ("1 2", "3"), ("1 000", "1")],
]


@pytest.mark.parametrize(("truth", "answer"), [*QUANTITIES, *CODES])
def test_units_and_codes_are_left_open(truth: str, answer: str) -> None:
    """Units and codes are left undecided, and no helper is started. The judge decides them; without
    a judge the answer is not right."""
    algebra = MathVerifier()
    assert asyncio.run(algebra.is_equal(truth, answer)) is asyncio.run(algebra.is_equal(answer, truth)) is None
    assert algebra._helper is None


@pytest.mark.parametrize(
    "text", ["3x", "-3x", "x^2", "2x + 6", "2xy", "2ab", "5k - 1", "x = 12", "n = 3 or n = 4", "2\\pi r", "3 + 4i", "50\\%"]
)
def test_coefficients_are_mathematics(text: str) -> None:
    """Numbers with letters as coefficients and variables are recognized as mathematics, and not as
    units."""
    assert is_mathematics(text)


def test_algebra_survives_its_helper() -> None:
    """A killed helper is replaced. A helper ends with the object that started it."""
    algebra = MathVerifier()
    assert asyncio.run(algebra.is_equal("1/2", "0.5")) is True
    helper = algebra._helper
    assert helper is not None
    os.kill(helper.pid, 9)
    helper.wait(10)
    assert asyncio.run(algebra.is_equal("1/2", "0.5")) is True
    second = algebra._helper
    assert second is not None and second.pid != helper.pid
    del algebra
    assert second.wait(10) == -9, "the helper outlived the object that started it"


def test_a_helper_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a timeout, a question to a hanging helper raises an InfraError that names the helper,
    which is killed. The next question gets a new helper."""
    algebra = MathVerifier()
    assert asyncio.run(algebra.is_equal("1/2", "0.5")) is True
    helper = algebra._helper
    assert helper is not None
    os.kill(helper.pid, signal.SIGSTOP)
    with monkeypatch.context() as short:
        short.setattr("megatron_rl.rewards.algebra.HELPER_TIMEOUT_S", 0.2)  # its successor has not loaded SymPy by then either
        with pytest.raises(InfraError, match=r"algebra: 2 helper processes failed; last error: no response within 0\.2 s"):
            asyncio.run(algebra.is_equal("1/2", "0.5"))
    assert helper.wait(10) == -9
    assert asyncio.run(algebra.is_equal("1/2", "0.5")) is True


def when(holds: Callable[[], object]) -> None:
    """Wait for `holds` to return something true. Runs in a thread while the question is open."""
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_helper_killed_during_a_question(frozen: bool) -> None:
    """The helper is killed before it forks (the question waits in its pipe) or while its fork
    computes. A second helper answers this question and the next ones."""
    algebra = MathVerifier()
    assert asyncio.run(algebra.is_equal("1/2", "0.5")) is True
    helper = algebra._helper
    assert helper is not None
    children = Path(f"/proc/{helper.pid}/task/{helper.pid}/children")

    async def ask() -> bool | None:
        question = asyncio.create_task(algebra.is_equal("1/2", "0.5") if frozen else algebra.is_equal("5", "9^{9^{9^{9}}}"))
        await (asyncio.sleep(0.3) if frozen else asyncio.to_thread(when, children.read_text))
        assert not question.done()
        os.kill(helper.pid, signal.SIGKILL)
        return await question

    if frozen:
        os.kill(helper.pid, signal.SIGSTOP)
    assert asyncio.run(ask()) is (True if frozen else None)
    assert helper.returncode == -signal.SIGKILL
    assert asyncio.run(algebra.is_equal("1/2", "0.5")) is True and asyncio.run(algebra.is_equal("1/2", "0.6")) is False


def test_a_helper_that_ends_between_look_and_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper that is alive when it is checked and dead when the question is written
    (BrokenPipeError) is replaced."""
    algebra = MathVerifier()
    assert asyncio.run(algebra.is_equal("1/2", "0.5")) is True
    helper = algebra._helper
    assert helper is not None
    monkeypatch.setattr(helper, "poll", lambda: None)
    os.kill(helper.pid, signal.SIGKILL)
    os.waitid(os.P_PID, helper.pid, os.WEXITED | os.WNOWAIT)
    assert asyncio.run(algebra.is_equal("1/2", "0.5")) is True


WITHOUT_FORKS = """import errno, os
from megatron_rl.rewards import algebra
def fork(): raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
os.fork = fork
algebra._serve_questions()"""


@pytest.mark.parametrize(
    ("fails", "reason"), [("exit 3", "code 3|Broken pipe"), (f"exec {sys.executable} -c '{WITHOUT_FORKS}'", "cannot fork: .*unavailable")]
)
@pytest.mark.parametrize("failing", [1, 2])
def test_helpers_that_fail(failing: int, fails: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each helper that starts leaves a line in a file. One that fails is replaced; if the second
    one fails too, the question raises an InfraError, and the next question is answered."""
    started, program = tmp_path / "started", tmp_path / "python"
    works = f'exec {sys.executable} "$@"'
    program.write_text(f"#!/bin/sh\necho >> {started}\nif [ $(wc -l < {started}) -le {failing} ]; then\n{fails}\nfi\n{works}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    algebra = MathVerifier()
    if failing == 2:
        with pytest.raises(InfraError, match=f"^algebra: 2 helper processes failed; .*({reason})"):
            asyncio.run(algebra.is_equal("1/2", "0.5"))
        assert started.read_text() == "\n\n"
    assert asyncio.run(algebra.is_equal("1/2", "0.5")) is True
    assert started.read_text() == "\n" * (failing + 1)


def test_a_helper_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(InfraError, match="^algebra: .*missing"):
        asyncio.run(MathVerifier().is_equal("1/2", "0.5"))


def test_the_helper_gets_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    algebra = MathVerifier()
    assert asyncio.run(algebra.is_equal("1", "2")) is False
    assert algebra._helper is not None
    with open(f"/proc/{algebra._helper.pid}/environ", "rb") as file:
        assert b"secret" not in file.read()


@pytest.mark.parametrize("text", ["listen", "12 apples", "A or B", "$3$ $4$", "5\n6", "3?", "1" * 201, "", "__import__('os')"])
def test_words_are_no_mathematics(text: str) -> None:
    assert not is_mathematics(text)


def test_algebra_takes_any_text() -> None:
    """Random pieces of LaTeX are wrong or undecided. They never raise an exception and never equal
    a number that they do not contain."""
    dice = random.Random(0)
    pieces = ["\\frac", "\\sqrt", "\\int", "\\sum", "\\begin{pmatrix}", "\\\\", "\\{", *"&{}()^_!=<12x"]
    texts = ["".join(dice.choices(pieces, k=dice.randint(1, 12))) for _ in range(150)]

    async def ask() -> list[bool | None]:
        algebra = MathVerifier()
        return [await algebra.is_equal("738.25", text) for text in texts]

    verdicts = asyncio.run(ask())
    assert set(verdicts) <= {False, None} and len(verdicts) == 150
