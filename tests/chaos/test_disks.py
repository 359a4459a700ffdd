"""The mishaps of disks and of /dev/shm bite, are taken back, and are left out with a reason where a machine has none of them."""

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
    print(seen(sys.executable, "-m", "tests.support.chaos_disks"))
    assert not Path("/dev/shm/ballast").exists(), "it was in a /dev/shm of its own"


def test_a_user_without_rights_is_told_what_cannot_be() -> None:
    if os.geteuid():
        pytest.skip("the other test is this one where the user is not root")
    told = seen(sys.executable, SUPPORT / "unprivileged.py", sys.executable, "-m", "tests.support.chaos_disks")
    assert "no mounts of its own" in told
