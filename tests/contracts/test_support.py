"""tests/support/README.md lists every helper exactly once and nothing else, and a forked script
runs as in an interpreter of its own.
"""

import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.support import fork_server

SUPPORT = ROOT / "tests" / "support"


def test_every_helper_is_listed_once() -> None:
    rows = [line.split("|")[1] for line in (SUPPORT / "README.md").read_text().splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`([\w/]+)`", row)]
    assert sorted(listed) == sorted(str(path.relative_to(SUPPORT).with_suffix("")) for path in SUPPORT.rglob("*.py"))


def test_a_forked_script_has_the_default_start_method(tmp_path: Path) -> None:
    """With the server's own method, the semaphores of a killed process would stay in /dev/shm until
    the tests end.
    """
    script = tmp_path / "script.py"
    script.write_text("import multiprocessing\nprint(multiprocessing.get_start_method())\n")
    forked = fork_server.run_script(script, timeout_s=60)
    fresh = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True)
    assert (forked.returncode, forked.stdout) == (0, fresh.stdout) and fresh.stdout.strip()
