"""Symbolic equality of two short LaTeX expressions, computed by math-verify in a killable process.

The text comes from the policy and is untrusted: an expression of ten characters can make SymPy
compute a number with a billion digits. Therefore, a helper process imports SymPy once and runs
every comparison in a forked process. Each forked process has a limit on its CPU time (two seconds)
and on its address space. The exit status of the forked process is the verdict. If a forked process
exceeds a limit (SIGPROF, SIGSEGV, MemoryError), the verdict is "undecided". The timeouts of
math-verify rely on signals to the caller's main thread, so they are switched off (math-verify
0.9.0, parser.py and utils.py). Only the LaTeX parser of math-verify is used, because the parser for
plain expressions calls SymPy's parse_expr, which evaluates Python.

Both expressions are first converted to LaTeX (typed_math.py). The following texts are not compared:
texts longer than MAX_EXPRESSION_CHARS, texts with words, codes (`A12`), quantities (`5 km`),
relations that contain only numbers (`1=1`), and labels made of digits, such as times and dates
(labels.py). SymPy would read adjacent letters as a product,
so `listen` would equal `silent`, and `A12` would equal `12A`. Math-verify's removal of units is
switched off, because otherwise `5 km` would equal `5 m`, and `x + 2t` would equal `x + 2`.
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
"""Pairs of values that must agree, each with a flag. The flag of a pair is True if the pair is the
last one in its chain of equalities (equations.links).
"""
MAX_EXPRESSION_CHARS = 200
CPU_LIMIT_S = 2.0
WALL_LIMIT_S = 30.0
"""Wall-clock limit per question in seconds. It applies on busy machines, where a fork may not get
its two seconds of CPU time.
"""
MEMORY_LIMIT_MIB = 1024
"""Limit on the address space per question in MiB."""
HELPER_TIMEOUT_S = 300.0
"""Timeout in seconds for a response from the helper process, including its startup; a helper that
exceeds it is replaced.
"""
MAX_ATTEMPTS = 2
"""Maximum number of helper processes that are tried per question; if the last one fails,
PermanentInfraError is raised.
"""
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
"""Pairs of texts that the helper compares before its first fork, because SymPy and ANTLR import
modules lazily and each fork would have to repeat these imports.
"""
_LETTERS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+")
_NAMED = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{1,2}(?:_\w|_\{\w*\}|\(\w\))?\s*=")
"""Matches the name and equals sign before a value: `x =`, `AB =`, `S_{10} =`, `f(x) =`."""
_JOINED = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+(?:[\s~.}]|\\[ ,;:!])*\d|\d(?:[\s~]|\\[ ,;:!])+\d")
"""Matches a letter before a digit (`A12`, `No 7`), or two adjacent numbers. Math-verify adds
adjacent numbers: `1 2` would be 3, and `1 1/2` would be (1 + 1)/2.
"""
_SUM = re.compile(r"[^\s({\[,=:+-]\s*[+<>-]|\\[lg](?:t|eq?)(?![A-Za-z])|\^\{[^{}]*[A-Za-z]")
"""Matches notation that does not occur in codes and quantities: a sum, a difference, an inequality,
or a power with a letter in its exponent. A leading sign does not match.
"""
_UNREADABLE = re.compile(
    r"[^ -~]|\.\s*\.|\\[lc]?dots|[-+]\s*[-+]|\d\s*:\s*\d|\d\s*_|\d\s*(?:\\?\{|\[)"
    r"|(?:(?:\A|[^A-Za-z}\]_^\\])\{[^{}]*\}|\\\}|(?<!sqrt)\[[^\[\]]*\]|\\circ)\s*(?:[\d({\[]|\\\{|\\[dtc]?(?:frac|binom))"
    r"|\\log_\{[^{}]*\}\s*\{[^{}]*\}(?!\s*(?:\Z|[-+=<>/,;)]|\\(?:cdot|times)))"
    r"|\^\s*(?:\w|\{[^{}]*\})\s*\^|(?<![\w}\])${.,:;])~|\\(?:not)?in(?![A-Za-z])\s*(?:[A-Za-z]|\\(?!\{|mathbb|emptyset|varnothing))"
)
r"""Matches notation that math-verify misreads.

- Characters that math-verify drops (`5\u2295`), ellipses, two signs in a row, and a ratio or a time
  inside an expression.
- A number with an index: `101_2` is read as 101.
- Adjacent groups, which are added: `{3}{3}`, `3[4]`, `3^\circ7`.
- Powers of powers without braces, which are grouped from the left: `2^3^2`.
- Negations (`~p`), and membership in a named set, which is read as equality: `a \in A`.
"""
_FORMULA = re.compile(r"\d|\\[A-Za-z]|(?<![A-Za-z])[A-Za-z]\s*[+^]\s*[A-Za-z](?![A-Za-z])")
_RELATION = re.compile(r"[=<>]|\\(?:le|ge|lt|gt|ne|leq|geq|neq)(?![A-Za-z])")
"""Matches a relation. Math-verify treats any two true relations that contain only numbers (`1=1`,
`3>2`) as equal, and likewise any two false relations.
"""
_VECTORS = re.compile(
    r".*\\nabla|(?=.*(?:\\times|\xd7))(?=.*(?:\\(?:vec|hat|overrightarrow|mathbf|boldsymbol|bm|pmb|bf)(?![A-Za-z])|\*\*))", re.DOTALL
)
"""Matches products of vectors, which math-verify would read as commutative products of numbers."""
_COMMAND = re.compile(r"\\[A-Za-z]+")
_FACTOR = re.compile(r"[abeinpqru]|[xyz]{1,2}|ab")
"""Matches the letters after a number if the letters are variables and not a unit: `3x`, `2ab`."""


_DEGREES_OF_AN_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])[^\n]*\\circ")
r"""Matches a trigonometric function of an angle in degrees. Math-verify reads 30^\circ as 30
radians, with a sine of -0.99.
"""
_DECIMAL_BEFORE_BRACKETS = re.compile(r"\.\d+\(\d+\)", re.ASCII)
"""Matches `0.1(6)`, which is ambiguous: it may be a product, a repeating decimal or an uncertainty.
"""
_THOUSANDS = re.compile(r"(?<![\d.,(\[{])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\S)")
"""Matches a number such as `1,000`, but not at the start of a list in brackets: `(100,200)` is a
pair.
"""
_THOUSANDS_IN_A_LIST = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\S)")
_ALTERNATIVES = re.compile(r"\\(?:pm|mp)(?![A-Za-z])|(?<![A-Za-z])or(?![A-Za-z])")


class MathVerifier:
    """Compares pairs of expressions in a helper process, one pair at a time.

    The helper process starts when the first pair is compared, and ends when this object is deleted.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="algebra")
        self._helper: subprocess.Popen[str] | None = None
        self._finalizer: Callable[[], object] | None = None

    async def is_equal(self, truth: str, answer: str) -> bool | None:
        """Return True if both texts are mathematically equal, False if not, None if undecided.

        The result is None if a text is not mathematics or the check times out. Several named values
        (`x = 1, y = 2`) are compared by name; if the names differ, the result is None.

        Raises:
            PermanentInfraError: MAX_ATTEMPTS helper processes failed.
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
        raise PermanentInfraError(f"algebra: {MAX_ATTEMPTS} helper processes failed; last error: {reasons[-1]}")

    def _ensure_helper(self) -> subprocess.Popen[str]:
        """Return the helper process, and start it first if it is not running.

        Raises OSError if no process can be started.
        """
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
    """Send two expressions, encoded as JSON, to the helper process and return the verdict.

    Raises:
        OSError: The helper exited (BrokenPipeError if it exited before receiving the question),
            timed out (TimeoutError) or cannot fork.
    """
    assert helper.stdin is not None and helper.stdout is not None
    helper.stdin.write(question + "\n")
    helper.stdin.flush()
    answers = select.poll()
    answers.register(helper.stdout, select.POLLIN)
    if not answers.poll(HELPER_TIMEOUT_S * 1000):
        raise TimeoutError(f"no response within {HELPER_TIMEOUT_S:g} s")
    line = helper.stdout.readline()
    if not line:
        raise ChildProcessError(f"exited with code {helper.wait()}")
    verdict = json.loads(line)
    if isinstance(verdict, str):
        raise ChildProcessError(verdict)
    return verdict


def is_mathematics(text: str) -> bool:
    r"""Return True if a text is a mathematical expression and nothing else.

    A mathematical expression is short and contains a digit, a LaTeX command, or a sum or power of
    single letters. Labels and relations that contain only numbers do not count as mathematical
    expressions. The text must not contain words (three adjacent letters that are not a `\command`),
    inner dollar signs or line breaks.
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
    """Remove thousands separators: `1,000` -> `1000`.

    In a list in brackets, the first element keeps its separators unless the list elements are
    separated by `, ` or `;`.
    """
    pattern = _THOUSANDS_IN_A_LIST if re.search(r",\s|;", text) else _THOUSANDS
    return pattern.sub(lambda found: found[0].replace(",", ""), text)


def _bracket_kind(text: str) -> str:
    """Return "set" for {a, b}, "pair" for (a, b) or an interval, and "" for any other text.

    Callers need the kind because math-verify treats a pair and the set of its elements as equal.
    """
    inside = to_latex(text).strip("$ ")
    if "," not in inside:
        return "set" if _ALTERNATIVES.search(inside) else ""
    return "set" if inside.startswith(("\\{", "{")) else "pair" if inside.startswith(("(", "[")) else ""


def _is_label(text: str) -> bool:
    r"""Return True for a code or a quantity: a number next to letters without an operator.

    Examples of labels are `A12`, `K7-2`, `12A`, `5 km`, `7\text{ m}` and `30 km/h`; `3x`, `2x + 6`
    and `2k + 1` are not labels. The texts `3m` and `\frac{1}{2}mv^2` count as labels, because their
    letters cannot be distinguished from units.
    """
    bare = _NAMED.sub("=", re.sub(r"(?<![A-Za-z])or(?![A-Za-z])", ",", text))
    if _JOINED.search(bare):
        return True
    sums = _SUM.search(bare) is not None
    letters = _LETTERS.findall(bare)
    return re.search(r"\d", bare) is not None and not all(_FACTOR.fullmatch(run) or (sums and len(run) == 1) for run in letters)


def _helper_environment() -> dict[str, str]:
    """Return a minimal set of environment variables for the helper process.

    The helper reads untrusted text, so it must not have the caller's API keys.
    """
    return {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME") if name in os.environ}


def _kill_helper(helper: subprocess.Popen[str]) -> None:
    helper.kill()
    helper.communicate()


def _verify_in_fork(truth: str, answer: str, chains: Chains) -> bool | None:
    """Compute the verdict in a forked process. Raises OSError if the process cannot be forked."""
    from megatron_rl.rewards.math_verdict import verdict

    child = os.fork()
    if child == 0:
        status = _UNDECIDED
        try:
            os.close(sys.stdout.fileno())  # otherwise the caller would not notice if the helper exits while this fork runs
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_MIB << 20, MEMORY_LIMIT_MIB << 20))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            # SIGPROF and SIGALRM have no handlers here, so they always end the process
            signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
            signal.setitimer(signal.ITIMER_REAL, WALL_LIMIT_S)
            status = {True: _RIGHT, False: _WRONG, None: _UNDECIDED}[verdict(truth, answer, chains)]
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    return {_RIGHT: True, _WRONG: False}.get(os.waitstatus_to_exitcode(ended))


def _serve_questions() -> None:
    logging.disable(logging.CRITICAL)  # suppress math-verify's warning that its timeouts are off
    from megatron_rl.rewards import math_verdict

    for truth, answer in _EXAMPLES:
        math_verdict.verdict(truth, answer)
    for line in sys.stdin:
        try:
            verdict: bool | str | None = _verify_in_fork(*json.loads(line))
        except OSError as error:
            verdict = f"cannot fork: {error}"
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    _serve_questions()
