"""Plants one mistake at a time in a copy of the source tree and reports which test fails because of
it.

    python -m tests.mutation                 # every mutant; takes hours
    python -m tests.mutation clip tests/algo # mutants with one of these words in their name or tests
    python -m tests.mutation --results runs/mutants.jsonl  # continues where it was stopped
    python -m tests.mutation --list

Runs the tests that CI runs: none that is marked long or gpu. Exits with 1 if no test notices a
mistake, or if a test that failed also fails without the mistake. tests/contracts/test_mutants.py
keeps the table in step with the code.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutation.mutant import Mutant
from tests.mutation.table import MUTANTS
from tests.support.forked_pytest import preload, run_forked

ROOT = Path(__file__).resolve().parents[2]
TEST_TIMEOUT_S = 600
PYTEST = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "-m", "not long and not gpu"]
FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", flags=re.MULTILINE)
EMULATED_CUDA = "-p tests.support.cuda.session"
"""Start of `Mutant.tests` for tests that need the emulated device in their process."""
_STAMPS = itertools.count(1_000_000_000)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of the tests of one mutant."""

    failing_test: str
    """Id of the first test that failed with the mistake in place; "" if none did."""
    summary: str
    """Last line of pytest: if no test passed, all were skipped."""
    seconds: float


def run_pytest(arguments: Sequence[str], tree: Path, timeout_s: float = TEST_TIMEOUT_S) -> tuple[int, str]:
    """Run pytest in the copy of the source tree, and return its exit status and its output.

    Tests with the emulated device start in a fresh interpreter, which sets it up before torch is
    imported.
    """
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [*PYTEST, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        if EMULATED_CUDA not in " ".join(arguments):
            status = run_forked(command, tree, environment, output=output, timeout_s=timeout_s)
            return status, output.read_text(errors="replace")
    fresh = [sys.executable, "-m", "pytest", *command]
    result = subprocess.run(fresh, cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    return result.returncode, result.stdout


def run_mutant(mutant: Mutant, tree: Path) -> Outcome:
    """Plant the mistake, run the mutant's tests, and remove the mistake."""
    path, began = tree / mutant.file, time.monotonic()
    original = path.read_text()
    _write(path, original.replace(mutant.old, mutant.new))
    status, output = run_pytest(["-x", *mutant.tests.split(" ")], tree)
    _write(path, original)
    failure = FAILURE.search(output)
    assert failure or status == 0, f"{mutant.name}: pytest exited with {status}\n{output[-2000:]}"
    return Outcome(failure[1] if failure else "", output.strip().splitlines()[-1], round(time.monotonic() - began, 1))


def _write(path: Path, text: str) -> None:
    """Write a source file with a time stamp of its own.

    Python uses the compiled file of a source file with the same size and the same second.
    """
    path.write_text(text)
    stamp = next(_STAMPS)
    os.utime(path, (stamp, stamp))


def find_tests_failing_anyway(noticed: dict[Mutant, str], tree: Path) -> set[str]:
    """Return the ids of `noticed` that fail without any mistake: they prove nothing."""
    failing: set[str] = set()
    for is_emulated in (False, True):
        ids = {test for mutant, test in noticed.items() if mutant.tests.startswith(EMULATED_CUDA) == is_emulated}
        if ids:
            status, output = run_pytest([*(EMULATED_CUDA.split(" ") if is_emulated else ()), *sorted(ids)], tree, TEST_TIMEOUT_S * len(ids))
            failing |= set(FAILURE.findall(output))
            assert failing or status == 0, f"pytest exited with {status}\n{output[-2000:]}"
    return failing


def read_noticed(results: Path | None) -> dict[Mutant, str]:
    """Return {mutant: id of the test that noticed it} from an earlier call's results."""
    if results is None or not results.exists():
        return {}
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    return {Mutant(**row["mutant"]): row["failing_test"] for row in rows if row["failing_test"]}


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
    parser.add_argument("words", nargs="*", help="plant only mutants with one of these words in their name or tests")
    parser.add_argument("--list", action="store_true", help="print the table and plant nothing")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="JSON Lines file to append to; mutants that it has as noticed are skipped"
    )
    options = parser.parse_args()
    chosen = [row for row in MUTANTS if not options.words or any(word in row.name or word in row.tests for word in options.words)]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name} ({mutant.file})")
        print(f"{len(chosen)} mutants")
        return 0
    preload()
    earlier = read_noticed(options.results)
    noticed = {mutant: earlier[mutant] for mutant in chosen if mutant in earlier}
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        subprocess.run(["git", "init", "-q", folder], check=True)  # a test lists the files that git would track
        for number, mutant in enumerate(chosen, 1):
            if mutant in noticed:
                continue
            print(f"[{number}/{len(chosen)}] {mutant.name} ({mutant.file})", end="", flush=True)
            outcome = run_mutant(mutant, Path(folder))
            if outcome.failing_test:
                noticed[mutant] = outcome.failing_test
            print(f": {outcome.failing_test or f'SURVIVED {mutant.tests}: {outcome.summary}'} ({outcome.seconds:.0f} s)", flush=True)
            if options.results:
                with options.results.open("a") as file:
                    file.write(json.dumps({"mutant": asdict(mutant), **asdict(outcome)}) + "\n")
        failing_anyway = find_tests_failing_anyway(noticed, Path(folder))
    for test in sorted(failing_anyway):
        print(f"FAILS WITHOUT A MISTAKE: {test}")
    print(f"{len(chosen)} mutants, {len(chosen) - len(noticed)} survived")
    return int(len(noticed) < len(chosen) or bool(failing_anyway))


if __name__ == "__main__":
    sys.exit(main())
