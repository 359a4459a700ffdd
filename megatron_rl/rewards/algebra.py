"""Symbolic equality of two short LaTeX expressions by math-verify, in a process that may be killed.

The text is the policy's: an expression of ten characters can ask SymPy for a number with a billion digits. So a helper process imports
SymPy once and forks for every question; the fork has two seconds of processor time and a bounded address space, and its exit status is the
answer. What ends it early (SIGPROF, SIGSEGV, MemoryError) is "undecided". math-verify's own time-outs are signals to the caller's main
thread; they are switched off (math-verify 0.9.0, parser.py and utils.py). Only its LaTeX reader is used: the one for plain expressions ends
in SymPy's parse_expr, which evaluates Python.

Both sides are written as LaTeX first (typed_math.py). What is not asked: texts beyond LONGEST characters, texts with words, codes
(`A12`), times, dates and other labels of digits (labels.py), quantities (`5 km`), statements about numbers alone (`1=1`). SymPy reads
letters as a product: `listen` would equal `silent`, and `A12` would equal `12A`. math-verify's removal of units is switched off: `5 km`
would equal `5 m`, and `x + 2t` would equal `x + 2`.
"""

import asyncio
import json
import logging
import os
import re
import resource
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from megatron_rl.data.answer_text import ends_in_dots
from megatron_rl.errors import PermanentInfraError
from megatron_rl.rewards.equations import PART_SEPARATOR, count_names, is_value_equation, links, read_named_values
from megatron_rl.rewards.labels import read_digit_label
from megatron_rl.rewards.latex_commands import are_known
from megatron_rl.rewards.letter_case import distinguish_cases
from megatron_rl.rewards.matrices import matrix
from megatron_rl.rewards.typed_math import to_latex

Chains = Sequence[tuple[str, str, bool]]
"""Values that must agree (equations.links)."""
MAX_EXPRESSION_CHARS = 200
CPU_LIMIT_S = 2.0
WALL_LIMIT_S = 30.0
"""Of one question; the second is for a machine that is busy with other things."""
MEMORY_LIMIT_MIB = 1024
"""Of one question's address space."""
HELPER_TIMEOUT_S = 300.0
"""What a helper may take for an answer, its own start with it; one that is silent longer hangs, and another takes its place."""
MAX_ATTEMPTS = 2
"""Helpers that a question may meet; the last one's end is a PermanentInfraError."""
_RIGHT, _WRONG, _UNDECIDED = 0, 1, 2
_EXAMPLES = (
    ("1/2", "50%"),
    ("\\sqrt{2}x+1", "1+x\\sqrt{2}"),
    ("\\{1,2\\}", "\\{2,1\\}"),
    ("x=12", "12"),
    ("2\\pi", "6.283185"),
    ("[1,2)", "[1,3)"),
    ("x^2-1", "(x-1)(x+1)"),
    ("3", "4"),
)
"""Answered before the first question, because SymPy and ANTLR load much of themselves on first use and forks would do so every time."""
_LETTERS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+")
_NAMED = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{1,2}(?:_\w|_\{\w*\}|\(\w\))?\s*=")
r"""What a value is called: `x =`, `AB =`, `S_{10} =`, `f(x) =`."""
_JOINED = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+(?:[\s~.}]|\\[ ,;:!])*\d|\d(?:[\s~]|\\[ ,;:!])+\d")
"""A letter before a digit (`A12`, `No 7`), or a number before a number (math-verify adds the two: `1 2` would be 3, and `1 1/2` 1)."""
_SUM = re.compile(r"[^\s({\[,=:+-]\s*[+<>-]|\\[lg](?:t|eq?)(?![A-Za-z])|\^\{[^{}]*[A-Za-z]")
"""A sum, difference, inequality or power with a letter, which codes and quantities are not; a sign at the front makes none."""
_UNREADABLE = re.compile(
    r"[^ -~]|\.\s*\.|\\[lc]?dots|[-+]\s*[-+]|\d\s*:\s*\d|\d\s*_|\d\s*(?:\\?\{|\[)"
    r"|(?:(?:\A|[^A-Za-z}\]_^\\])\{[^{}]*\}|\\\}|(?<!sqrt)\[[^\[\]]*\]|\\circ)\s*(?:[\d({\[]|\\\{|\\[dtc]?(?:frac|binom))"
    r"|\\log_\{[^{}]*\}\s*\{[^{}]*\}(?!\s*(?:\Z|[-+=<>/,;)]|\\(?:cdot|times)))"
    r"|\^\s*(?:\w|\{[^{}]*\})\s*\^|(?<![\w}\])${.,:;])~|\\(?:not)?in(?![A-Za-z])\s*(?:[A-Za-z]|\\(?!\{|mathbb|emptyset|varnothing))"
)
"""Characters that math-verify drops (`5\u2295`), dots that go on, two signs in a row, a ratio or a time inside of something else, a number
with an index (`101_2`, which it reads as 101), groups in a row (`{3}{3}`, `3[4]`, `3^\\circ7`, which it adds), powers of powers without
braces (`2^3^2`, which it groups from the left), negations (`~p`), members of a set with a name
(`a \\in A`, which it takes for equal)."""
_FORMULA = re.compile(r"\d|\\[A-Za-z]|(?<![A-Za-z])[A-Za-z]\s*[+^]\s*[A-Za-z](?![A-Za-z])")
_RELATION = re.compile(r"[=<>]|\\(?:le|ge|lt|gt|ne|leq|geq|neq)(?![A-Za-z])")
"""Statements about numbers alone (`1=1`, `3>2`): math-verify finds any two true ones equal, and any two false ones."""
_VECTORS = re.compile(
    r".*\\nabla|(?=.*(?:\\times|\xd7))(?=.*(?:\\(?:vec|hat|overrightarrow|mathbf|boldsymbol|bm|pmb|bf)(?![A-Za-z])|\*\*))", re.DOTALL
)
"""Products of vectors: math-verify takes every product for one of numbers, in any order."""
_COMMAND = re.compile(r"\\[A-Za-z]+")
_FACTOR = re.compile(r"[abeinpqru]|[xyz]{1,2}|ab")
"""Letters that stand behind a number as variables and not as a unit: `3x`, `2ab`."""


_DEGREES_OF_AN_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])[^\n]*\\circ")
"""math-verify reads 30^\\circ as 30, of which the sine is -0.99."""
_DECIMAL_BEFORE_BRACKETS = re.compile(r"\.\d+\(\d+\)", re.ASCII)
"""`0.1(6)`: a product, a repeating decimal or an uncertainty."""
_THOUSANDS = re.compile(r"(?<![\d.,(\[{])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\S)")
"""`1,000`, not at the front of a list in brackets: `(100,200)` is a pair."""
_THOUSANDS_IN_A_LIST = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\S)")
_ALTERNATIVES = re.compile(r"\\(?:pm|mp)(?![A-Za-z])|(?<![A-Za-z])or(?![A-Za-z])")


class MathVerifier:
    """One helper process, started by the first question and ended with this object; questions are asked one after another."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="algebra")
        self._helper: subprocess.Popen[str] | None = None
        self._finalizer: Callable[[], object] | None = None

    async def is_equal(self, truth: str, answer: str) -> bool | None:
        """Return whether both are the same mathematically; None if one is no mathematics or the check times out. Raises
        PermanentInfraError.

        Several named values (`x = 1, y = 2`) are compared name by name; beside a text without names they are left open.
        """
        if (rows := matrix(truth)) and (others := matrix(answer)):
            return await self._equal_by_entry(rows, others)
        if not (is_mathematics(truth) and is_mathematics(answer)) or {_bracket_kind(truth), _bracket_kind(answer)} == {"set", "pair"}:
            return None
        (wanted, chain), (given, other_chain) = (links(_without_thousands(to_latex(text))) for text in (truth, answer))
        if wanted == given and not chain and not other_chain:
            return True
        if (told_apart := distinguish_cases(wanted, given)) is None:
            return None
        wanted, given = told_apart
        if ("=" in wanted) != ("=" in given) and not (is_value_equation(wanted) and is_value_equation(given)):
            return None
        if max(count_names(wanted), count_names(given)) > 1:
            return await self._compare_named_values(read_named_values(wanted), read_named_values(given))
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._query_helper, wanted, given, [*chain, *other_chain])

    async def _equal_by_entry(self, wanted: Sequence[Sequence[str]], given: Sequence[Sequence[str]]) -> bool | None:
        if [*map(len, wanted)] != [*map(len, given)]:
            return False
        pairs = [pair for row, other in zip(wanted, given, strict=True) for pair in zip(row, other, strict=True)]
        verdicts = [one == other or await self.is_equal(one, other) for one, other in pairs]
        return False if False in verdicts else None if None in verdicts else True

    async def _compare_named_values(self, wanted: Mapping[str, str], given: Mapping[str, str]) -> bool | None:
        if not wanted or wanted.keys() != given.keys():
            return None
        verdicts = [await self.is_equal(value, given[name]) for name, value in wanted.items()]
        return False if False in verdicts else None if None in verdicts else True

    def _query_helper(self, truth: str, answer: str, chains: Chains) -> bool | None:
        reasons: list[OSError] = []
        while len(reasons) < MAX_ATTEMPTS:
            try:
                return _read_verdict(self._ensure_helper(), json.dumps([truth, answer, chains]))
            except OSError as error:
                reasons.append(error)
                self._stop_helper()
        raise PermanentInfraError(f"algebra: no answer by {MAX_ATTEMPTS} helpers; the last: {reasons[-1]}")

    def _ensure_helper(self) -> subprocess.Popen[str]:
        """The helper that lives, or a new one. Raises OSError where the machine has no room for one."""
        if self._helper is not None and self._helper.poll() is None:
            return self._helper
        self._stop_helper()
        command = [sys.executable, "-m", "megatron_rl.rewards.algebra"]
        self._helper = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=_helper_environment()
        )
        self._finalizer = weakref.finalize(self, _kill_helper, self._helper)
        return self._helper

    def _stop_helper(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._helper = self._finalizer = None


def _read_verdict(helper: subprocess.Popen[str], question: str) -> bool | None:
    """Raises OSError where the helper ends (BrokenPipeError: it had ended already), hangs (TimeoutError) or says that it cannot fork."""
    assert helper.stdin is not None and helper.stdout is not None
    helper.stdin.write(question + "\n")
    helper.stdin.flush()
    answers = select.poll()
    answers.register(helper.stdout, select.POLLIN)
    if not answers.poll(HELPER_TIMEOUT_S * 1000):
        raise TimeoutError(f"it did not answer within {HELPER_TIMEOUT_S:g} s")
    line = helper.stdout.readline()
    if not line:
        raise ChildProcessError(f"it ended with status {helper.wait()}")
    verdict = json.loads(line)
    if isinstance(verdict, str):
        raise ChildProcessError(verdict)
    return verdict


def is_mathematics(text: str) -> bool:
    r"""Return whether a text is mathematics and nothing else.

    It is short, has a digit or a LaTeX command, is no label and no statement about numbers alone, and is without words (three letters that
    are no `\command`), inner dollars and lines.
    """
    inside = to_latex(text).strip("$") if len(text) <= MAX_EXPRESSION_CHARS and "\n" not in text.strip() and not ends_in_dots(text) else ""
    if set(inside) & set("$?\"'") or not _FORMULA.search(inside) or _UNREADABLE.search(inside) or not are_known(inside):
        return False
    if _DEGREES_OF_AN_ANGLE.search(inside) or _DECIMAL_BEFORE_BRACKETS.search(text):
        return False
    if _VECTORS.match(text) or any(read_digit_label(part) for part in (text, *PART_SEPARATOR.split(text))):
        return False
    if _RELATION.search(inside) and not re.search("[A-Za-z]", _COMMAND.sub("", inside)):
        return False
    return not any(len(letters) > 2 for letters in _LETTERS.findall(inside)) and not _is_label(inside)


def _without_thousands(text: str) -> str:
    """Write `1,000` as `1000`; where a blank or a semicolon parts a list in brackets, its first element, too."""
    pattern = _THOUSANDS_IN_A_LIST if re.search(r",\s|;", text) else _THOUSANDS
    return pattern.sub(lambda found: found[0].replace(",", ""), text)


def _bracket_kind(text: str) -> str:
    """Return `set` for {a, b}, `pair` for (a, b) and intervals, which math-verify takes for the set; nothing for other texts."""
    inside = to_latex(text).strip("$ ")
    if "," not in inside:
        return "set" if _ALTERNATIVES.search(inside) else ""
    return "set" if inside.startswith(("\\{", "{")) else "pair" if inside.startswith(("(", "[")) else ""


def _is_label(text: str) -> bool:
    r"""A code or a quantity: letters beside a number that no operator ties to it (`A12`, `K7-2`, `12A`, `5 km`, `7\text{ m}`, `30 km/h`).

    `3x`, `2x + 6` and `2k + 1` are none. `3m` is, and so is `\frac{1}{2}mv^2`: nothing tells their letters from units.
    """
    bare = _NAMED.sub("=", re.sub(r"(?<![A-Za-z])or(?![A-Za-z])", ",", text))
    if _JOINED.search(bare):
        return True
    sums = _SUM.search(bare) is not None
    letters = _LETTERS.findall(bare)
    return re.search(r"\d", bare) is not None and not all(_FACTOR.fullmatch(run) or (sums and len(run) == 1) for run in letters)


def _helper_environment() -> dict[str, str]:
    """The helper reads untrusted text: it is not given the caller's keys."""
    return {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME") if name in os.environ}


def _kill_helper(helper: subprocess.Popen[str]) -> None:
    helper.kill()
    helper.communicate()


def _verify_in_fork(truth: str, answer: str, chains: Chains) -> bool | None:
    """Raises OSError where the machine has no room for another process."""
    from megatron_rl.rewards.math_verdict import verdict

    child = os.fork()
    if child == 0:
        status = _UNDECIDED
        try:
            os.close(sys.stdout.fileno())  # the caller sees the helper's end while a fork of it still works
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_MIB << 20,) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.setitimer(
                signal.ITIMER_PROF, CPU_LIMIT_S
            )  # nobody handles SIGPROF and SIGALRM: they end the process, whatever it is doing
            signal.setitimer(signal.ITIMER_REAL, WALL_LIMIT_S)
            status = {True: _RIGHT, False: _WRONG, None: _UNDECIDED}[verdict(truth, answer, chains)]
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    return {_RIGHT: True, _WRONG: False}.get(os.waitstatus_to_exitcode(ended))


def _serve_questions() -> None:
    logging.disable(logging.CRITICAL)  # math-verify warns that its time-outs are off
    from megatron_rl.rewards import math_verdict

    for truth, answer in _EXAMPLES:
        math_verdict.verdict(truth, answer)
    for line in sys.stdin:
        try:
            verdict: bool | str | None = _verify_in_fork(*json.loads(line))
        except OSError as error:
            verdict = f"it cannot fork: {error}"
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    _serve_questions()
