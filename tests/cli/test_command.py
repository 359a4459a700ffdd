"""The command `megatron-rl` and its subcommands."""

import os
import signal
import subprocess
import sys

import pytest

import megatron_rl
from megatron_rl.__main__ import COMMANDS, main
from megatron_rl.io.pipes import exit_with_reader
from tests.conftest import ROOT

GLOSSARY = (
    "train", "evaluate", "compare", "convert", "merge", "check", "viewer", "doctor", "launch", "sweep", "sweep-report", "submit",
    "attempt", "serve", "server-command", "explain", "rescore", "export",
)  # fmt: skip


def test_there_is_one_command_for_each_program() -> None:
    """The commands are those of the glossary, and each script in launch/ starts the command of its
    name.
    """
    assert COMMANDS.keys() == {*GLOSSARY}
    scripts = {path.stem.replace("_", "-"): path.read_text() for path in (ROOT / "launch").glob("*.py")}
    assert len(scripts) == 14 and scripts.keys() <= COMMANDS.keys()
    del scripts["sweep"]  # starts the scripts beside it
    for name, text in scripts.items():
        assert text.endswith(f'if __name__ == "__main__":\n    sys.exit(main(["{name}", *sys.argv[1:]]))\n'), name


@pytest.mark.parametrize(
    "name", ["compare", "convert", "merge", "check", "sweep", "sweep-report", "submit", "attempt", "explain", "export"]
)
def test_a_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--help describes the command's own arguments."""
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("usage: ")


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ([], 0, "usage: megatron-rl COMMAND ..."),
        (["--version"], 0, f"megatron-rl {megatron_rl.__version__}"),
        (["trian"], 2, "error: trian: no such command; did you mean train?"),
        (["optim.lr=1"], 2, "error: optim.lr=1: no such command; did you mean: megatron-rl train optim.lr=1 ...?"),
        (["xyz"], 2, "error: xyz: no such command; choose one of train, evaluate, "),
    ],
)
def test_the_first_word_is_a_command(words: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words or ["--help"]) == code
    output = capsys.readouterr()
    assert (output.err if code else output.out).startswith(told)


def test_only_the_command_is_ended_by_its_reader() -> None:
    """A process that runs a command and goes on is not ended by a closed pipe later."""
    before = signal.getsignal(signal.SIGPIPE)
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    assert signal.getsignal(signal.SIGPIPE) is before
    with exit_with_reader():
        assert signal.getsignal(signal.SIGPIPE) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGPIPE) is before


@pytest.mark.parametrize(
    "words", ["-m megatron_rl train --help all", "launch/train.py --help all", "launch/train.py --cfg all model.path=x"]
)
def test_a_reader_that_ends_is_no_error(words: str) -> None:
    """A command ends without a message if its reader ends, as in `... | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *words.split()]
    ended = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (-signal.SIGPIPE, "")
