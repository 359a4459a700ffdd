"""The scripts in tools/ run as separate processes from any folder, and operating-system errors
become one-line messages.
"""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.distributed.world import SharedOSError
from megatron_rl.io.jsonl import write_error_line
from megatron_rl_tools.commands import format_error
from tests.conftest import ROOT
from tests.support import fork_server

FILES = sorted(
    path for room in ("convert", "data") for path in (ROOT / "tools" / room).rglob("*.py") if "argparse.ArgumentParser(" in path.read_text()
)
"""Commands for users. tools/docs builds this repository's documentation, with -m in its folder."""


def test_a_file_runs_in_an_interpreter_of_its_own(tmp_path: Path) -> None:
    file = ROOT / "tools" / "convert" / "merger.py"
    said = subprocess.run([sys.executable, str(file), "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert said.stdout.startswith("usage: ") and not said.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_file_runs_by_itself(file: Path, tmp_path: Path) -> None:
    said = fork_server.run_script(file, "--help", cwd=tmp_path, timeout_s=120)
    assert said.returncode == 0 and said.stdout.startswith("usage: ") and "examples:" in said.stdout


def test_no_command_is_left_out() -> None:
    known = {"converter_hf_to_mcore", "merger", "merge_run", "compare", "make_shapes", "make_tiny_qwen2_5_vl", "make_visual_search"}
    assert known < {file.stem for file in FILES}


WRITTEN = "--out=new/out: could not be written ({}); free space or choose another folder"


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (None, WRITTEN),
        ("new", WRITTEN),
        ("new/out", WRITTEN),
        ("new/out/a", WRITTEN),
        ("new/.out.partial/a", WRITTEN),
        ("new/.out.replaced", WRITTEN),
        ("new/other/a", "new/other/a: could not be read (No space left); check the disk and the file's permissions"),
    ],
)
def test_what_is_written_and_what_is_read(file: str | None, said: str) -> None:
    """An error for --out, its parents or its temporary folders is reported as a failed write. An
    error for another file in the same parent folder, where the source may be, is reported as a
    failed read.
    """
    error = OSError(errno.ENOSPC, "No space left", file) if file else OSError("No space left")
    assert format_error(error, out=Path("new/out")) == said.format(error)
    assert format_error(ValueError("key=1: no"), out=Path("new/out")) == "key=1: no"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO])
def test_a_broken_disk_needs_no_space(number: int) -> None:
    """The message for a read-only or failing disk contains the original error and recommends
    remounting the disk instead of freeing space, also if another process raised the error.
    """
    words = number, os.strerror(number)
    for error in (OSError(*words, "out/a"), SharedOSError(str(OSError(*words)))):
        line = write_error_line("run.dir", Path("/runs/a"), error)
        assert (
            line.startswith(f"run.dir=/runs/a: could not be written ({error}); ")
            and "free space" not in line
            and "check and remount it" in line
        )
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert write_error_line("run.dir", Path("/runs/a"), full).endswith("; free space or choose another folder")
