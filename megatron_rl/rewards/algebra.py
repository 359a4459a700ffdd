"""Symbolic equality of two short LaTeX expressions by math-verify, in a process that may be killed.

The text is the policy's: an expression of ten characters can ask SymPy for a number with a billion digits. So a helper process imports
SymPy once and forks for every question; the fork has two seconds of processor time and a bounded address space, and its exit status is the
answer. What ends it early (SIGPROF, SIGSEGV, MemoryError) is "undecided". math-verify's own time-outs are signals to the caller's main
thread; they are switched off (math-verify 0.9.0, parser.py and utils.py). Only its LaTeX reader is used: the one for plain expressions ends
in SymPy's parse_expr, which evaluates Python.

What is not asked: texts beyond LONGEST characters, and texts with words. SymPy reads a word as a product of letters, and `listen` would
equal `silent`.
"""

import asyncio
import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

LONGEST = 200
CPU_S = 2.0
WALL_S = 30.0
"""Of one question; the second is for a machine that is busy with other things."""
MEMORY_MIB = 1024
"""Of one question's address space."""
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


class Algebra:
    """One helper process, started by the first question and ended with this object; questions are asked one after another."""

    def __init__(self) -> None:
        self._line = ThreadPoolExecutor(max_workers=1, thread_name_prefix="algebra")
        self._helper: subprocess.Popen[str] | None = None

    async def equal(self, truth: str, answer: str) -> bool | None:
        """Whether both are the same mathematically; None where one is no mathematics, or it takes too long to tell."""
        if not (is_mathematics(truth) and is_mathematics(answer)):
            return None
        return await asyncio.get_running_loop().run_in_executor(self._line, self._ask, truth, answer)

    def _ask(self, truth: str, answer: str) -> bool | None:
        if self._helper is None or self._helper.poll() is not None:
            command = [sys.executable, "-m", "megatron_rl.rewards.algebra"]
            self._helper = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=_environment()
            )
            weakref.finalize(self, _end, self._helper)
        assert self._helper.stdin is not None and self._helper.stdout is not None
        self._helper.stdin.write(json.dumps([truth, answer]) + "\n")
        self._helper.stdin.flush()
        reply = self._helper.stdout.readline()
        assert reply, f"the algebra process ended with status {self._helper.wait()}"
        return json.loads(reply)


def is_mathematics(text: str) -> bool:
    r"""Short, with a digit or a LaTeX command, without words (three letters that are no `\command`), without inner dollars or lines."""
    inside = text.strip().strip("$")
    wordless = re.search(r"(?<![\\A-Za-z])[A-Za-z]{3,}", inside) is None
    return len(text) <= LONGEST and wordless and re.search(r"\d|\\[A-Za-z]", inside) is not None and not set(inside) & set("$\n?")


def _environment() -> dict[str, str]:
    """The helper reads untrusted text: it is not given the caller's keys."""
    return {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME") if name in os.environ}


def _end(helper: subprocess.Popen[str]) -> None:
    helper.kill()
    helper.communicate()


def _verify(truth: str, answer: str) -> int:
    from math_verify import parse, verify
    from math_verify.parser import LatexExtractionConfig

    read = [parse(_quoted(text), [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None) for text in (truth, answer)]
    if not all(read):
        return _UNDECIDED
    return _RIGHT if verify(*read, timeout_seconds=None) else _WRONG


def _quoted(text: str) -> str:
    """As one formula; math-verify knows a percentage by the sign behind the formula."""
    inside = text.strip().strip("$").strip()
    bare = inside.removesuffix("%").removesuffix("\\")
    return f"${bare}$%" if inside.endswith("%") else f"${inside}$"


def _in_a_fork(truth: str, answer: str) -> bool | None:
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MIB << 20,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # nobody handles SIGPROF and SIGALRM: they end the process, whatever it is doing
        signal.setitimer(signal.ITIMER_REAL, WALL_S)
        status = _UNDECIDED
        try:
            status = _verify(truth, answer)
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    return {_RIGHT: True, _WRONG: False}.get(os.waitstatus_to_exitcode(ended))


def _serve() -> None:
    logging.disable(logging.CRITICAL)  # math-verify warns that its time-outs are off
    for truth, answer in _EXAMPLES:
        _verify(truth, answer)
    for line in sys.stdin:
        print(json.dumps(_in_a_fork(*json.loads(line))), flush=True)


if __name__ == "__main__":
    _serve()
