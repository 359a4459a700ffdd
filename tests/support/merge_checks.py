"""Checks for tests of the merger: a merge succeeds with bitwise equal tensors, or is refused with
one line and leaves nothing behind.
"""

from pathlib import Path

import pytest
import torch

from megatron_rl_tools.convert import merger
from tests.support.foreign_checkpoints import State


def run_merge(checkpoint: Path, out: Path, *options: object) -> int:
    return merger.main(["--checkpoint", str(checkpoint), "--out", str(out), *map(str, options)])


def assert_same_tensors(found: State, wanted: State) -> None:
    assert found.keys() == wanted.keys()
    assert not [name for name in wanted if found[name].dtype != wanted[name].dtype or not torch.equal(found[name], wanted[name])]


def assert_refused(checkpoint: Path, out: Path, capsys: pytest.CaptureFixture[str], *said: str, options: tuple[object, ...] = ()) -> None:
    """Check that the merge exits with code 1, prints one error line, and writes nothing."""
    capsys.readouterr()
    assert run_merge(checkpoint, out, *options) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert not [part for part in said if part not in error], error
    assert not out.exists() and not out.with_name(f".{out.name}.partial").exists()
