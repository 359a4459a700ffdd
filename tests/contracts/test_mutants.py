"""The table of mutants matches the code: each mutant can be applied, and the tests that it names
exist.
"""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.mutation import __main__ as program
from tests.mutation.__main__ import copy_tree, read_noticed
from tests.mutation.mutant import Mutant
from tests.mutation.table import MUTANTS
from tests.support.forked_pytest import run_forked


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_can_be_planted(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1 and mutant.new != mutant.old
    words = mutant.tests.split(" ")
    files = [word for word in words if word.startswith("tests/")]
    assert files and all((ROOT / file.split("::")[0]).exists() for file in files)
    text = "".join((ROOT / file.split("::")[0]).read_text() for file in files)
    assert all(word in text for file in files for word in file.split("::")[1:])
    assert "-k" not in words or words[words.index("-k") + 1] in text


def test_the_copy_is_complete(tmp_path: Path) -> None:
    """Without megatron_rl/configs, which is a link, tests would fail whatever was planted."""
    copy_tree(tmp_path)
    assert (tmp_path / "megatron_rl" / "configs" / "train.yaml").is_file()
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(tracked) > 500 and [name for name in tracked if (ROOT / name).exists() and not (tmp_path / name).exists()] == []


ADD = Mutant("sums are differences", "megatron_rl/sums.py", "a + b", "a - b", "tests/test_sums.py -k add")
MULTIPLY = Mutant("products are sums", "megatron_rl/sums.py", "a * b", "a + b", "tests/test_sums.py -k add")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Create a source tree with a package of this project's name, and tests of it."""
    for folder in ("megatron_rl", "tests"):
        (tmp_path / "tree" / folder).mkdir(parents=True)
    (tmp_path / "tree" / "megatron_rl" / "__init__.py").touch()
    (tmp_path / "tree" / ADD.file).write_text("def add(a, b):\n    return a + b\n\n\ndef multiply(a, b):\n    return a * b\n")
    slow = "import os, subprocess, time\n\n\ndef test_hangs():\n    child = subprocess.Popen(['sleep', '600'])\n"
    slow += "    open(os.environ['PID_FILE'], 'w').write(str(child.pid))\n    time.sleep(600)\n"
    (tmp_path / "tree" / "tests" / "test_slow.py").write_text(slow)
    test = "from megatron_rl.sums import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
    (tmp_path / "tree" / ADD.tests.partition(" ")[0]).write_text(test)
    return tmp_path / "tree"


def test_a_call_with_results_skips_what_was_noticed(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One mutant is noticed and one survives, in the tree's own package of two with the same name.
    A second call plants only the survivor.
    """
    results = tmp_path / "results.jsonl"
    monkeypatch.setattr(program, "MUTANTS", (ADD, MULTIPLY))
    monkeypatch.setattr(program, "preload", lambda: None)
    monkeypatch.setattr(program, "copy_tree", lambda target: subprocess.run(["cp", "-r", f"{tree}/.", target], check=True))
    monkeypatch.setattr(sys, "argv", ["mutation", "--results", str(results)])
    assert program.main() == 1
    first = capsys.readouterr().out
    assert "[1/2] sums are differences (megatron_rl/sums.py): tests/test_sums.py::test_add" in first
    assert "[2/2] products are sums (megatron_rl/sums.py): SURVIVED" in first and first.endswith("2 mutants, 1 survived\n")
    assert read_noticed(results) == {ADD: "tests/test_sums.py::test_add"} and (tree / ADD.file).read_text().count("a + b") == 1
    assert program.main() == 1
    assert "[1/2]" not in (second := capsys.readouterr().out) and "[2/2] products" in second


def test_a_test_that_hangs_is_killed_with_its_processes(tree: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(subprocess.TimeoutExpired):
        run_forked(
            ["tests/test_slow.py"], tree, {**os.environ, "PID_FILE": str(pid_file)}, output=tmp_path / "output", timeout_s=3,
        )  # fmt: skip
    with suppress(ProcessLookupError, ChildProcessError):
        for _ in range(100):
            status = Path(f"/proc/{pid_file.read_text()}/stat")
            if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
                break
            time.sleep(0.05)
        else:
            pytest.fail("the test's process is running")


def test_the_table_is_long_enough() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
