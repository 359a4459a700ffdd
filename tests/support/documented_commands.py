"""Extracts the commands from a text and parses them with the parsers of the programs they start,
without starting anything.

Commands stand in indented blocks: if one line of a block is a command, every line is. Each command
is passed to the parser that would read it: torchrun's, Hydra's with a check of every setting, the
argparse parser of a script or an entry point, or pytest's for tests/run.sh.
"""

import argparse
import ast
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from functools import cache
from importlib import import_module
from itertools import dropwhile, groupby, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from hydra.errors import HydraException
from torch.distributed import run as torchrun

from megatron_rl.cli.app import register_tasks
from megatron_rl.cli.flags import parse_flags
from megatron_rl.cli.serve import build_parser as build_serve_parser
from megatron_rl.cli.serve import names_run
from megatron_rl.launcher.sweep import parse_options
from megatron_rl.launcher.sweep_file import read_sweep
from megatron_rl.models.family import FAMILIES
from tests.conftest import ROOT
from tests.contracts.test_configs import settings_of
from tools.data.make_gymnasium import UNUSED, parse_arguments

PYTHONS = ("python", ".venv/bin/python", ".venv-trl/bin/python")
HYDRA = ("launch/train.py", "launch/doctor.py", "launch/server_command.py", "launch/evaluate.py", "launch/serve.py")
SLURM = {"sbatch": "", "squeue": "--me", "scancel": "--me|JOB|--batch --signal=USR1 JOB"}
"""Allowed arguments of Slurm commands. Those of sbatch are checked elsewhere."""
ASSIGNMENTS = re.compile(r"(?:[A-Z_]+=\S*\s+)*")
"""Matches environment variables set before a command."""


class InvalidCommand(Exception):
    """Raised for a command that does not parse."""


class ArgumentsParsed(BaseException):
    """Ends a script after its arguments were read.

    No `except Exception` of the script catches it.
    """


def indented_blocks(text: str) -> Iterator[list[str]]:
    """Yield blocks of lines that are indented by at least four spaces, outside code fences.

    A backslash joins a line with the next one.
    """
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).replace("\\\n", " ")
    for indented, lines in groupby(text.splitlines(), key=lambda line: line.startswith("    ")):
        if indented:
            yield [line.strip() for line in lines]


def split_words(line: str) -> list[str]:
    """Split a command into words, without comments and without the environment variables set before
    it.
    """
    return shlex.split(line[ASSIGNMENTS.match(line).end() :], comments=True)


def is_command(line: str) -> bool:
    first, *_ = [*line[ASSIGNMENTS.match(line).end() :].split(maxsplit=1), ""]
    return first in ("bash", "torchrun", *PYTHONS, *SLURM, *entry_points()) or first.endswith((".py", ".sh"))


def extract_commands(text: str) -> list[str]:
    """Return every line of every block that contains a command, except comments, and every command
    of several words in `backticks`.
    """
    quoted = [span for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text) if is_command(span) and len(split_words(span)) > 1]
    return [line for lines in indented_blocks(text) if any(map(is_command, lines)) for line in lines if split_words(line)] + quoted


def module_docs(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


@cache
def entry_points() -> dict[str, str]:
    """Return the console scripts of setup.py as {name: module:function}."""
    with patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    return dict(re.split(r"\s*=\s*", entry) for entry in setup.call_args.kwargs["entry_points"]["console_scripts"])


def check_command(line: str, config: pytest.Config) -> None:
    """Raise InvalidCommand, or the error of composing the settings, if the command is invalid."""
    first, *rest = split_words(line)
    if first == "bash":
        check_shell(rest, config)
    elif first == "source":
        if rest != [".venv/bin/activate", "&&", "export", "OMP_NUM_THREADS=1"]:
            raise InvalidCommand(f"{line}: is not how the environment that launch/install.sh makes is activated")
    elif first == "torchrun" or (first in PYTHONS and rest[0] == "launch/launch.py"):
        words = rest if first == "torchrun" else rest[1:]
        given = parse_or_raise(lambda: torchrun.get_args_parser().parse_args(words))
        check_script(given.training_script, given.training_script_args)
    elif first in PYTHONS and rest[0] == "-m":
        check_argparse(rest[1], lambda: runpy.run_module(rest[1], run_name="__main__", alter_sys=True), rest[2:])
    elif first in PYTHONS:
        check_script(rest[0], rest[1:])
    elif first == "sbatch":
        check_job(rest)
    elif first in SLURM:
        if not re.fullmatch(SLURM[first], " ".join(rest)):
            raise InvalidCommand(f"{line}: is not how one's own jobs are named")
    elif first in entry_points():
        module, _, function = entry_points()[first].partition(":")
        check_argparse(first, getattr(import_module(module), function), rest)
    else:
        check_executable(first)
        check_script(first, rest)


@cache
def doc_examples(document: str = "docs/extend.md") -> dict[str, str]:
    """Return the sources of the files in a document by name.

    Such a file is a Python code block whose first line is a comment with the name.
    """
    text = (ROOT / document).read_text()
    return dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


def check_script(script: str, arguments: list[str]) -> None:
    examples = doc_examples() | doc_examples("README.md")
    if script in examples:
        with patch("megatron_rl.cli.cli", lambda **own: register_tasks(own.get("tasks", {}))), patch.dict(FAMILIES):
            exec(examples[script], {"__name__": "__main__"})
        check_settings(arguments)
        return
    if script in doc_examples("docs/gymnasium.md"):
        check_demonstrations(arguments)
        return
    if not (ROOT / script).is_file():
        raise InvalidCommand(f"{script}: no such file")
    if script.startswith("examples/") and "add_argument" not in (ROOT / script).read_text():
        check_example(script, arguments)
    elif script == "launch/submit.py":
        check_settings([word for word in takewhile(lambda word: word != "--", arguments) if word != "--dry-run"])
    elif script == "launch/serve.py" and names_run(arguments):
        parse_or_raise(lambda: build_serve_parser().parse_args(arguments))
    elif script in HYDRA:
        try:
            given = parse_flags(arguments)
        except ValueError as error:
            raise InvalidCommand(str(error)) from error
        if not given.help:
            check_settings(given.overrides)
    else:
        check_argparse(script, lambda: runpy.run_path(str(ROOT / script), run_name="__main__"), arguments)


def check_example(script: str, arguments: list[str]) -> None:
    """Start a file of examples/ as if its model existed, and check the settings that it would use.

    An example that is not a run takes at most one argument, a folder.
    """
    started: list[tuple[list[str], dict[str, type]]] = []

    def begin(**own: Any) -> None:
        started.append((sys.argv[1:], own.get("tasks", {})))

    def demonstrate(_: object, given: list[str]) -> int:
        check_demonstrations(given)
        return 0

    if not re.search(r"^    cli\(", (ROOT / script).read_text(), re.MULTILINE):
        if arguments[1:] or "=" in "".join(arguments):
            raise InvalidCommand(f"{script} takes one folder: {arguments}")
        return
    with (
        patch("megatron_rl.cli.cli", begin),
        patch("megatron_rl_tools.data.make_gymnasium.main", demonstrate),
        patch("asyncio.run", lambda started: started.close()),  # tests/examples runs what examples/mcp_tools.py demonstrates
        patch.object(Path, "exists", lambda path: path.name != "adapter"),
        patch.object(sys, "argv", [script, *arguments]),
        TemporaryDirectory() as folder,
        chdir(folder),
    ):
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise InvalidCommand(f"{script} {arguments}: {ended.code}") from ended
    for overrides, tasks in started:
        register_tasks(tasks)
        check_settings(overrides)


def check_demonstrations(arguments: list[str]) -> None:
    """Check the arguments of a file that calls tools/data/make_gymnasium.py."""
    given = parse_or_raise(lambda: parse_arguments(arguments))
    check_settings([*UNUSED, *given.settings])


def check_settings(overrides: list[str]) -> None:
    try:
        settings_of(*overrides)
    except (HydraException, ValueError) as error:
        raise InvalidCommand(f"{' '.join(overrides)}: {error}") from error


def check_shell(words: list[str], config: pytest.Config) -> None:
    script, *arguments = words
    check_executable(script)
    syntax = subprocess.run(["bash", "-n", script], cwd=ROOT, capture_output=True, text=True, check=False)
    if syntax.returncode:
        raise InvalidCommand(syntax.stderr)
    if script == "tests/run.sh":
        check_pytest([word for word in arguments if word != "--quick"], config)
    elif script == "launch/install.sh":
        if arguments not in ([], ["cpu"], ["gpu"]):
            raise InvalidCommand(f"{script}: {arguments}: is no kind of machine")
    elif script == "launch/lewis.sh":
        _, port, epochs, _, seed, *settings = arguments
        if not all(word.isdigit() for word in (port, epochs, seed)):
            raise InvalidCommand(f"{script}: PORT, EPOCHS and SEED are numbers: {arguments}")
        check_settings(["experiment=lewis_speaker_7b_h100x4", *settings])
    elif script == "launch/lewis_pair.sh":
        mode, _, _, _, *settings = arguments
        if mode not in ("simultaneous", "alternating"):
            raise InvalidCommand(f"{script}: {mode}: is no way to train two")
        for experiment in ("lewis_cpu", "lewis_listener_cpu"):
            check_settings([f"experiment={experiment}", *settings])
    elif script == "launch/install_agents.sh":
        unknown = [name for name in arguments[1:] if not (ROOT / "requirements" / "agents" / f"{name}.txt").is_file()]
        if not arguments or unknown:
            raise InvalidCommand(f"{script}: a folder, and names of requirements/agents: {arguments}")
    elif script == "launch/quickstart.sh":
        check_settings(["experiment=numberline_grpo_cpu", *arguments])
    elif arguments:
        raise InvalidCommand(f"{script} takes no arguments: {arguments}")


def check_job(words: list[str]) -> None:
    """Check a job submission: options of sbatch, a script and its arguments. sbatch's own parsing
    is covered by tests/e2e/test_slurm_cluster.py.
    """
    script, *arguments = dropwhile(is_option, words)
    check_executable(script)
    if script == "launch/slurm/sweep.sbatch":
        options = parse_or_raise(lambda: parse_options([*arguments, "--task", "0"]))
        try:
            tasks = read_sweep(ROOT / options.sweep).tasks
        except ValueError as error:
            raise InvalidCommand(f"{arguments}: {error}") from error
        for task in tasks:
            check_settings(list(task.overrides))
    else:
        check_settings(list(dropwhile(is_option, arguments)))


def is_option(word: str) -> bool:
    return word.startswith("--")


def check_pytest(arguments: list[str], config: pytest.Config) -> None:
    try:
        given = config._parser.parse(arguments)
    except pytest.UsageError as error:
        raise InvalidCommand(f"{arguments}: {error}") from error
    for place in given.file_or_dir:
        if not (ROOT / place.split("::")[0]).exists():
            raise InvalidCommand(f"{place}: no such test")


def check_executable(script: str) -> None:
    path = ROOT / script
    if not (path.is_file() and os.access(path, os.X_OK) and path.read_text().startswith("#!")):
        raise InvalidCommand(f"{script}: cannot be started as printed")


def check_argparse(name: str, start: Callable[[], object], arguments: list[str]) -> None:
    """Run a script up to the point where its arguments are parsed."""

    def only(reads: Callable[..., object]) -> Callable[..., None]:
        def parse_only(parser: argparse.ArgumentParser, args: list[str] | None = None, namespace: object = None) -> None:
            reads(parser, args, namespace)
            raise ArgumentsParsed

        return parse_only

    with (
        patch.object(argparse.ArgumentParser, "parse_args", only(argparse.ArgumentParser.parse_args)),
        patch.object(argparse.ArgumentParser, "parse_intermixed_args", only(argparse.ArgumentParser.parse_intermixed_args)),
        patch.object(sys, "argv", [name, *arguments]),
        prepend_to_sys_path(ROOT / name),
    ):
        try:
            parse_or_raise(start)
        except ArgumentsParsed:
            return
    raise InvalidCommand(f"{name} did not read its arguments")


def parse_or_raise(parse: Callable[[], Any]) -> Any:
    """Return the result of `parse`.

    A parser's error raises InvalidCommand instead of ending the process.
    """
    with patch.object(argparse.ArgumentParser, "error", lambda parser, message: _raise(InvalidCommand(f"{parser.prog}: {message}"))):
        return parse()


@contextmanager
def prepend_to_sys_path(script: Path) -> Iterator[None]:
    """Allow imports of modules in the script's folder, as when Python starts the script.

    Changes of sys.path are reverted afterwards.
    """
    before = list(sys.path)
    sys.path.insert(0, str(script.parent))
    try:
        yield
    finally:
        sys.path[:] = before


def _raise(error: Exception) -> None:
    raise error
