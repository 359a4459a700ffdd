"""Plants one mistake at a time in a copy of the source tree and reports which test fails because of
it.

    python -m tests.mutation                 # every mutant; takes minutes
    python -m tests.mutation clip schedule   # mutants whose name contains one of these words
    python -m tests.mutation --list

Exits with 1 if no test notices a mistake. tests/contracts/test_mutants.py keeps the table in step
with the code.
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


def find_failing_test(mutant: Mutant, tree: Path) -> str:
    """Return the id of the first test that fails with the mistake in place, or "" if none does."""
    path = tree / mutant.file
    original = path.read_text()
    path.write_text(original.replace(mutant.old, mutant.new))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-W", "ignore", "-p", "no:cacheprovider", *mutant.tests.split(" ")]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TEST_TIMEOUT_S, check=False)
    path.write_text(original)
    failure = re.search(r"^(?:FAILED|ERROR) (\S+)", result.stdout, flags=re.MULTILINE)
    assert failure or result.returncode == 0, f"{mutant.name}: pytest exited with {result.returncode}\n{result.stdout[-2000:]}"
    return failure[1] if failure else ""


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
    num_survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        for number, mutant in enumerate(chosen, 1):
            print(f"[{number}/{len(chosen)}] {mutant.name} ({mutant.file})", end="", flush=True)
            began = time.monotonic()
            failing_test = find_failing_test(mutant, Path(folder))
            num_survivors += not failing_test
            print(f": {failing_test or 'SURVIVED ' + mutant.tests} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(chosen)} mutants, {num_survivors} survived")
    return int(num_survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
