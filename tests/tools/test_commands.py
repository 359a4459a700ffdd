"""The commands for checkpoints as files, wherever they are started, and the words for errors of the system."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tools.commands import in_words

FILES = (
    "convert/converter_hf_to_mcore.py", "convert/merger.py", "convert/merge_run.py", "convert/compare.py", "data/make_shapes.py",
    "data/make_easy_vqa.py", "data/extract_images_from_parquet.py",
)  # fmt: skip


def test_every_file_runs_by_itself(tmp_path: Path) -> None:
    calls = [
        subprocess.Popen([sys.executable, str(ROOT / "tools" / file), "--help"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for file in FILES
    ]
    for file, call in zip(FILES, calls, strict=True):
        said, _ = call.communicate(timeout=120)
        assert call.returncode == 0 and said.startswith("usage: ") and "examples:" in said, file


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
    """Source and result may be neighbors."""
    error = OSError(errno.ENOSPC, "No space left", file) if file else OSError("No space left")
    assert in_words(error, out=Path("new/out")) == said.format(error)
    assert in_words(ValueError("key=1: no"), out=Path("new/out")) == "key=1: no"
