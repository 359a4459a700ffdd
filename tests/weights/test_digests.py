"""Digests of checkpoint files: they equal sha256sum's, and every tensor reader verifies them."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_rl.run.checkpoints import CheckpointState
from megatron_rl.weights.formats.digests import STATE, check_records, compute_sha256, make_file_record, recorded_files
from megatron_rl.weights.formats.torch_dist import McoreTensors, TorchDistWriter
from tests.support.corrupted_checkpoint import flip_signs
from tests.support.malicious_checkpoints import write_record


def make(folder: Path) -> None:
    folder.mkdir(parents=True)
    with TorchDistWriter(folder, file_bytes=1) as writer:
        writer.add("first", torch.full((20_000,), 0.5))
        writer.add("second", torch.full((20_000,), 0.25))
        writer.finish()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "step_00000001"
    make(folder)
    make(folder / "critic")
    (folder / "run").mkdir()
    write_record(folder, CheckpointState(step=1))
    return folder


def test_a_digest_is_that_of_sha256sum(tmp_path: Path) -> None:
    """The digest of a file equals the output of sha256sum."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 5000)
    expected = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout.split()[0]
    assert compute_sha256(path) == expected and make_file_record(path) == {"bytes": 1_280_000, "sha256": expected}


@pytest.mark.parametrize("part", ["", "critic"])
def test_changed_numbers_are_refused_by_file(part: str, checkpoint: Path) -> None:
    """A modified tensor file is rejected by its digest; a tensor in an unmodified file is still
    read. Without the recorded digests the modified file is read, because its archive and size are
    intact."""
    folder = checkpoint / part
    file, before = folder / "__0_0.distcp", compute_sha256(folder / "__0_0.distcp")
    assert McoreTensors(folder).read("first")[10_000] == 0.5
    second = (folder / "__0_1.distcp").read_bytes()
    assert flip_signs(folder) == 2
    (folder / "__0_1.distcp").write_bytes(second)
    stored, name = McoreTensors(folder, key="run.dir"), str(file.relative_to(checkpoint))
    for _ in range(2):
        told = f"run.dir={folder}: damaged: {name} has the SHA-256 {compute_sha256(file)}, not {before}; copy the checkpoint again, "
        with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
            stored.read("first")
    assert McoreTensors(folder).read("second")[10_000] == 0.25
    assert McoreTensors(folder, is_verified=True).read("first")[10_000] == -0.5, "a run has compared them all when it begins"
    (checkpoint / STATE).unlink()
    assert McoreTensors(folder).read("first")[10_000] == -0.5


def test_small_files_are_compared_when_the_folder_is_opened(checkpoint: Path) -> None:
    """A modified small file is rejected when the checkpoint is opened."""
    (checkpoint / "common.pt").write_bytes((checkpoint / "common.pt").read_bytes()[::-1])
    with pytest.raises(ValueError, match=r"damaged: common.pt has the SHA-256 \w{64}, not \w{64}; "):
        McoreTensors(checkpoint)
    McoreTensors(checkpoint / "critic")


def test_a_file_that_is_not_recorded_is_refused(checkpoint: Path) -> None:
    """A tensor in a file without a recorded digest is rejected.

    Redirecting the metadata to such a file would change the digest of the metadata.
    """
    files = {name: value for name, value in recorded_files(checkpoint).files.items() if name != "__0_1.distcp"}
    write_record(checkpoint, CheckpointState(step=1), files=files)
    assert McoreTensors(checkpoint).read("first")[0] == 0.5
    with pytest.raises(ValueError, match=r"damaged: __0_1.distcp is not recorded in run/state.json; "):
        McoreTensors(checkpoint).read("second")


def test_a_folder_of_no_run_has_no_record(checkpoint: Path, tmp_path: Path) -> None:
    """A folder outside a run's checkpoint has no recorded digests.

    The critic's folder uses those of its checkpoint.
    """
    make(tmp_path / "other")
    assert recorded_files(tmp_path / "other") is None
    assert recorded_files(checkpoint / "critic").prefix == "critic/" and recorded_files(checkpoint / "run") is None


@pytest.mark.parametrize(
    "files", [[], {"/etc/passwd": {"bytes": 1, "sha256": "0"}}, {"a/../../b": {"bytes": 1, "sha256": "0"}}, {"a": 4}, {"a": {"bytes": 1}}]
)
def test_a_record_of_a_stranger(files: object, checkpoint: Path) -> None:
    """A malformed record of digests, or one with paths outside the folder, is rejected in one
    line."""
    with pytest.raises((ValueError, TypeError)):
        check_records(files)
    write_record(checkpoint, CheckpointState(step=1), files=files)
    with pytest.raises(ValueError, match=r"^run.dir=.*: run/state.json cannot be read \(.*\); copy the whole checkpoint again$"):
        McoreTensors(checkpoint, key="run.dir")
