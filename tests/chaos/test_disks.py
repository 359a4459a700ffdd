"""The mishaps of disks and of /dev/shm have the intended effect and can be reversed.

On machines that do not support them they are skipped with a reason.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, SUPPORT
from tests.support import fork_server

pytestmark = pytest.mark.timeout(200)


def test_what_mishaps_do_to_disks() -> None:
    """The checks of tests/support/chaos_disks.py pass, and this process's /dev/shm is not
    affected.
    """
    ended = fork_server.run_script(SUPPORT / "chaos_disks.py", timeout_s=180)
    assert ended.returncode == 0 and ended.stdout.startswith("seen"), ended.stdout
    assert not Path("/dev/shm/ballast").exists(), "it was in a /dev/shm of its own"


def test_a_user_without_rights_is_told_what_cannot_be() -> None:
    """For a user without rights, all disk mishaps are skipped, and the reason is reported."""
    if os.geteuid():
        pytest.skip("the other test is this one where the user is not root")
    command = [sys.executable, SUPPORT / "unprivileged.py", sys.executable, "-m", "tests.support.chaos_disks"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert ended.stdout.startswith("seen") and "no mounts of its own" in ended.stdout, ended.stderr
