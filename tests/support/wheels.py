"""Builds this project's wheel."""

import subprocess
import sys
from pathlib import Path

from tests.mutation.__main__ import copy_tree


def build_wheel(folder: Path) -> Path:
    """Build the wheel of a copy of the source tree in `folder` and return its path."""
    copy_tree(folder / "source")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-input", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", str(folder), str(folder / "source")], check=True, timeout=240)
    (wheel,) = folder.glob("*.whl")
    return wheel
