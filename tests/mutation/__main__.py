"""Plants one mistake at a time in a copy of the source tree and reports which test fails because of
it.

    python -m tests.mutation                 # every mutant; takes minutes
    python -m tests.mutation clip schedule   # mutants whose name contains one of these words
    python -m tests.mutation --list

Runs the tests that CI runs: none that is marked long or gpu. Exits with 1 if no test notices a
mistake, or if a test that failed also fails without the mistake. tests/contracts/test_mutants.py
keeps the table in step with the code.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutation.mutant import Mutant
from tests.mutation.table import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
TEST_TIMEOUT_S = 600
PYTEST = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "-m", "not long and not gpu"]
FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", flags=re.MULTILINE)
EMULATED_CUDA = "-p tests.support.cuda.session"
"""Start of `Mutant.tests` for tests that need the emulated device in their process."""


def run_pytest(arguments: list[str], tree: Path, timeout_s: float = TEST_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [*PYTEST, *arguments]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)


def find_failing_test(mutant: Mutant, tree: Path) -> tuple[str, str]:
    """Return the id of the first test that fails with the mistake in place, or "" if none does, and
    pytest's last line: if no test passed, all were skipped.
    """
    path = tree / mutant.file
    original = path.read_text()
    path.write_text(original.replace(mutant.old, mutant.new))
    result = run_pytest(["-x", *mutant.tests.split(" ")], tree)
    path.write_text(original)
    failure = FAILURE.search(result.stdout)
    assert failure or result.returncode == 0, f"{mutant.name}: pytest exited with {result.returncode}\n{result.stdout[-2000:]}"
    return (failure[1] if failure else ""), result.stdout.strip().splitlines()[-1]


def find_tests_failing_anyway(noticed: dict[Mutant, str], tree: Path) -> set[str]:
    """Return the ids of `noticed` that fail without any mistake: they prove nothing."""
    failing: set[str] = set()
    for is_emulated in (False, True):
        ids = {test for mutant, test in noticed.items() if mutant.tests.startswith(EMULATED_CUDA) == is_emulated}
        if ids:
            result = run_pytest([*(EMULATED_CUDA.split(" ") if is_emulated else ()), *sorted(ids)], tree, TEST_TIMEOUT_S * len(ids))
            failing |= set(FAILURE.findall(result.stdout))
            assert failing or result.returncode == 0, f"pytest exited with {result.returncode}\n{result.stdout[-2000:]}"
    return failing


def copy_tree(target: Path) -> None:
    """Copy all files and links that git tracks or would track."""
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in files.stdout.splitlines():
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="plant only mutants whose name contains one of these words")
    parser.add_argument("--list", action="store_true", help="print the table and plant nothing")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if not options.words or any(word in mutant.name for word in options.words)]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name} ({mutant.file})")
        print(f"{len(chosen)} mutants")
        return 0
    noticed: dict[Mutant, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        for number, mutant in enumerate(chosen, 1):
            print(f"[{number}/{len(chosen)}] {mutant.name} ({mutant.file})", end="", flush=True)
            began = time.monotonic()
            failing_test, summary = find_failing_test(mutant, Path(folder))
            if failing_test:
                noticed[mutant] = failing_test
            print(f": {failing_test or f'SURVIVED {mutant.tests}: {summary}'} ({time.monotonic() - began:.0f} s)", flush=True)
        failing_anyway = find_tests_failing_anyway(noticed, Path(folder))
    for test in sorted(failing_anyway):
        print(f"FAILS WITHOUT A MISTAKE: {test}")
    print(f"{len(chosen)} mutants, {len(chosen) - len(noticed)} survived")
    return int(len(noticed) < len(chosen) or bool(failing_anyway))


if __name__ == "__main__":
    sys.exit(main())
