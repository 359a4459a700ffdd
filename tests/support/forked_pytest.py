"""Runs pytest in processes that are forked from one that has imported other packages.

A row of the table needs seconds of tests, and as many for `import torch`. This project's modules
are imported by each child, from the copy of the source tree.
"""

import gc
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

PRELOADED = (
    "fastapi", "gymnasium", "httpx", "hydra", "hypothesis", "numpy", "openai", "pandas", "PIL.Image", "pyarrow.parquet", "pydantic",
    "pytest_timeout", "rich.progress", "scipy.stats", "sympy", "torch", "transformers", "uvicorn", "xdist",
)  # fmt: skip
"""Modules that many tests import. Those of vLLM and Megatron-Core are not among them: this project
prepares the process before it imports them.
"""
OWN_PACKAGES = ("megatron_rl", "megatron_rl_tools", "megatron_rl_sandbox", "tests", "benchmarks")


def preload() -> None:
    """Import the modules of PRELOADED that are installed."""
    for name in PRELOADED:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.partition(".")[0]:
                raise
    gc.freeze()


def run_forked(arguments: Sequence[str], tree: Path, environment: dict[str, str], *, output: Path, timeout_s: float) -> int:
    """Run pytest with the tree as its folder, write what it prints to a file, and return its exit
    status. The process and those that it has left are killed.

    Raises subprocess.TimeoutExpired after the time limit.
    """
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _run_child(arguments, tree, environment, output)
    ends, status = time.monotonic() + timeout_s, None
    while status is None and time.monotonic() < ends:
        ended, code = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
        time.sleep(0.02)
    with suppress(ProcessLookupError):  # nothing is left
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
        raise subprocess.TimeoutExpired(list(arguments), timeout_s)
    return status


def _run_child(arguments: Sequence[str], tree: Path, environment: dict[str, str], output: Path) -> None:
    status = 1
    try:
        os.setsid()
        file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.chdir(tree)
        os.environ.clear()
        os.environ.update(environment)
        own = {str(Path(entry)) for entry in (*sys.path, "") if (Path(entry) / "megatron_rl").is_dir()}
        sys.path[:] = [str(tree), *(entry for entry in sys.path if entry not in own and entry)]
        for name in [name for name in sys.modules if name.partition(".")[0] in OWN_PACKAGES]:
            del sys.modules[name]
        status = pytest.main(list(arguments))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
