"""Starts processes in which CUDA devices are emulated."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.cuda.build import build_library
from tests.support.free_port import free_port

ROOT = Path(__file__).resolve().parents[3]
SESSION = "tests.support.cuda.session"


def _start(*arguments: object, **environment: object) -> subprocess.Popen[str]:
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **{name: str(value) for name, value in environment.items()}}
    for name in [name for name in given if name.startswith("PYTEST_")]:
        del given[name]  # those of pytest-xdist would make pytest a worker
    build_library()  # once, before several processes need it
    command = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run_tests(*arguments: str, timeout_s: float) -> None:
    """Run pytest in a process with emulated devices. Fails with its output if a test fails.

    Its temporary folders are its own: pytest keeps only the last three of a user.
    """
    options = ("-q", "-W", "ignore", "-p", SESSION, "-p", "no:cacheprovider")
    with tempfile.TemporaryDirectory() as folder:
        process = _start("pytest", *options, "--basetemp", Path(folder) / "tests", *arguments)
        _require_success([process], timeout_s=timeout_s)


def run_script(script: str, *arguments: object, timeout_s: float) -> str:
    """Run a script in a process with emulated devices and return the last line of its output. Fails
    with its output if the script fails.
    """
    return _require_success([_start("tests.support.cuda", script, *arguments)], timeout_s=timeout_s)[0].splitlines()[-1]


def run_world(num_ranks: int, script: Path, *arguments: object, timeout_s: float) -> None:
    """Run a script on several ranks, each with an emulated device of its own. Fails with the output
    of the ranks if one of them fails.
    """
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    ranks = [_start("tests.support.cuda", script, *arguments, **place, RANK=rank, LOCAL_RANK=rank) for rank in range(num_ranks)]
    _require_success(ranks, timeout_s=timeout_s)


def _require_success(processes: list[subprocess.Popen[str]], *, timeout_s: float) -> list[str]:
    """Wait for all processes and return their outputs.

    A rank that fails lets the others fail, because a connection ends.
    """
    until, outputs = time.monotonic() + timeout_s, []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=until - time.monotonic())[0])
    except subprocess.TimeoutExpired:
        for process in processes[len(outputs) :]:
            process.kill()
            outputs.append(process.communicate()[0])
    codes = [process.returncode for process in processes]
    assert not any(codes), f"{processes[0].args} exited {codes}:\n" + "\n".join(output[-6000:] for output in outputs)
    return outputs
