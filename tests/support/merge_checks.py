"""What the tests of the merger ask of a merge: that it succeeds, to the last bit, or is refused in one line and leaves nothing."""

from pathlib import Path

import pytest
import torch

from tests.support.foreign_checkpoints import State
from tools.convert import merger


def run_merge(checkpoint: Path, out: Path, *options: object) -> int:
    return merger.main(["--checkpoint", str(checkpoint), "--out", str(out), *map(str, options)])


def assert_same_tensors(found: State, wanted: State) -> None:
    assert found.keys() == wanted.keys()
    assert not [name for name in wanted if found[name].dtype != wanted[name].dtype or not torch.equal(found[name], wanted[name])]


def assert_refused(checkpoint: Path, out: Path, capsys: pytest.CaptureFixture[str], *said: str, options: tuple[object, ...] = ()) -> None:
    """Exit code 1, one line, nothing written."""
    capsys.readouterr()
    assert run_merge(checkpoint, out, *options) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert not [part for part in said if part not in error], error
    assert not out.exists() and not out.with_name(f".{out.name}.partial").exists()
