"""The mishaps of disks and of /dev/shm have the intended effect and can be reversed.

On machines that do not support them they are skipped with a reason.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, SUPPORT

pytestmark = pytest.mark.timeout(200)


def seen(*command: object) -> str:
    ended = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert ended.stdout.startswith("seen"), ended.stderr
    return ended.stdout


def test_what_mishaps_do_to_disks() -> None:
    """The checks of tests/support/chaos_disks.py pass, and this process's /dev/shm is not
    affected.
    """
    print(seen(sys.executable, "-m", "tests.support.chaos_disks"))
    assert not Path("/dev/shm/ballast").exists(), "it was in a /dev/shm of its own"


def test_a_user_without_rights_is_told_what_cannot_be() -> None:
    """For a user without rights, all disk mishaps are skipped, and the reason is reported."""
    if os.geteuid():
        pytest.skip("the other test is this one where the user is not root")
    told = seen(sys.executable, SUPPORT / "unprivileged.py", sys.executable, "-m", "tests.support.chaos_disks")
    assert "no mounts of its own" in told
