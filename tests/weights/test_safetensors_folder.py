"""Writing and reading of safetensors folders: file names as in Qwen's releases, contents read by
safetensors, bounded memory, damaged files and a full disk."""

import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_rl.weights.formats import safetensors_folder
from megatron_rl.weights.formats.safetensors_folder import HfTensors, write_hf_folder
from tests.conftest import ROOT


@pytest.fixture
def like(tmp_path: Path) -> Path:
    folder = tmp_path / "like"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json", "pytorch_model.bin", "old.safetensors"):
        (folder / name).write_text("{}")
    return folder


def some_tensors() -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for index in range(40):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[index % 3]
        yield f"layer.{index}.weight", torch.randn(7, 3 + index, generator=generator).to(dtype)
    yield "transposed", torch.randn(5, 9, generator=generator).T
    yield "scalar", torch.tensor(3.5)
    yield "view", torch.randn(100, generator=generator)[10:20]


def test_files_are_numbered_and_indexed_as_released_ones(like: Path, tmp_path: Path) -> None:
    """Shards are named, sized and indexed as in released models, and contain all tensors.

    Returned are the kinds of files that the source folder lacks.
    """
    out = tmp_path / "out"
    assert write_hf_folder(out, some_tensors(), like=like, shard_bytes=5000) == ["processor", "generation config"]
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 3
    assert [path.name for path in files] == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    wanted = dict(some_tensors())
    assert index["weight_map"].keys() == wanted.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
    for path in files:
        state = load_file(path)
        assert state.keys() == {name for name, file in index["weight_map"].items() if file == path.name}
        assert sum(tensor.nbytes for tensor in state.values()) <= 5000
        assert all(tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name]) for name, tensor in state.items())
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
    assert {path.name for path in out.iterdir()} - {path.name for path in files} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
    }


def test_a_full_header_begins_a_new_file(like: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new file starts if the header is full.

    The header of 43 tensors takes about 3500 bytes; the limits allow about half of them.
    """
    monkeypatch.setattr(safetensors_folder, "HEADER_BYTES", 2000)
    monkeypatch.setattr(safetensors_folder, "MAX_ENTRY_BYTES", 200)
    write_hf_folder(tmp_path / "out", some_tensors(), like=like)
    found = {name: tensor for path in sorted((tmp_path / "out").glob("*.safetensors")) for name, tensor in load_file(path).items()}
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3
    assert found.keys() == dict(some_tensors()).keys() and all(torch.equal(found[name], tensor) for name, tensor in some_tensors())


def test_a_check_sees_the_whole_folder_and_can_refuse_it(like: Path, tmp_path: Path) -> None:
    """The check function gets the complete folder; if it raises, no folder is written."""

    def check(folder: Path) -> None:
        assert json.loads((folder / "config.json").read_text()) == {"new": 1}
        assert len(load_file(next(folder.glob("*.safetensors")))) == 43
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        write_hf_folder(tmp_path / "out", some_tensors(), like=like, config={"new": 1}, check=check)
    assert [path.name for path in tmp_path.iterdir()] == ["like"]


@pytest.mark.parametrize("damage", ["a byte more", "another shape", "another name"])
def test_a_file_that_reads_back_differently_is_an_error(like: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    """A file that differs from what was written raises OSError, as if the disk had corrupted it,
    and no folder is left."""
    close = safetensors_folder._Shard.close

    def damaged(shard: safetensors_folder._Shard) -> None:
        close(shard)
        data = shard.path.read_bytes()
        changed = {
            "a byte more": data + b"0",
            "another shape": data.replace(b"[7, 3]", b"[3, 7]"),
            "another name": data.replace(b"layer.0.", b"layer.x."),
        }
        assert changed[damage] != data
        shard.path.write_bytes(changed[damage])

    monkeypatch.setattr(safetensors_folder._Shard, "close", damaged)
    with pytest.raises(OSError, match=re.escape("model-00001-of-00001.safetensors: ")):
        write_hf_folder(tmp_path / "out", some_tensors(), like=like)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    save_file({"model.norm.weight": torch.ones(4), "lm_head.weight": torch.ones(2, 4)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def numbered_tensors(*, fail_after: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    for index in range(6):
        if index == fail_after:
            raise RuntimeError("killed in the middle")
        yield f"t{index}", torch.full((1000,), float(index))


def test_a_written_folder_is_complete_and_replaces_the_old_one(source: Path, tmp_path: Path) -> None:
    """Writing twice leaves one complete folder and no temporary folder."""
    out = tmp_path / "out"
    for _ in range(2):
        write_hf_folder(out, numbered_tensors(), like=source, shard_bytes=9000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 6 * 4000
    stored = {name: load_file(out / file)[name] for name, file in index["weight_map"].items()}
    assert all(torch.equal(stored[name], tensor) for name, tensor in numbered_tensors())
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json",
        *sorted(set(index["weight_map"].values())),
        "model.safetensors.index.json",
    ]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_failed_write_leaves_nothing_and_keeps_the_old_one(source: Path, tmp_path: Path) -> None:
    """If writing fails, the old folder stays unchanged and no temporary folder is left."""
    out = tmp_path / "out"
    write_hf_folder(out, numbered_tensors(), like=source)
    before = (out / "model.safetensors.index.json").read_bytes()
    with pytest.raises(RuntimeError, match="killed"):
        write_hf_folder(out, numbered_tensors(fail_after=4), like=source, shard_bytes=4000)
    assert (out / "model.safetensors.index.json").read_bytes() == before
    assert not (tmp_path / ".out.partial").exists()


def test_a_full_disk_is_an_error_that_leaves_nothing(source: Path, tmp_path: Path) -> None:
    """A full disk raises OSError that names the file, and leaves no folder.

    A file-size limit makes the kernel refuse the write, as a full disk does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match="model-00001"):
            write_hf_folder(tmp_path / "out", numbered_tensors(), like=source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_damaged_and_incomplete_folders_are_named(source: Path) -> None:
    """A corrupt, missing or incomplete set of weight files is rejected by name."""
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="^model.path=.*: model.safetensors is corrupt"):
        HfTensors(source)
    path.unlink()
    with pytest.raises(ValueError, match="no \\*.safetensors"):
        HfTensors(source)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(ValueError, match="gone.safetensors"):
        HfTensors(source)


def test_memory_does_not_grow_with_the_file(like: Path, tmp_path: Path) -> None:
    """Writing 768 MB in tensors of 32 MB to one file raises peak memory by less than four tensors,
    not by the file size. The peak grows by two, briefly three, tensors (measured: 73 to 98 MiB)."""
    code = """
import resource, sys, torch
from pathlib import Path
from megatron_rl.weights.formats.safetensors_folder import write_hf_folder
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
torch.zeros(10)
before = peak()
write_hf_folder(Path(sys.argv[1]), ((str(index), torch.full((8 << 20,), float(index))) for index in range(24)), like=Path(sys.argv[2]))
print(peak() - before)"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out"), str(like)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 4 * (32 << 20)
    assert next((tmp_path / "out").glob("*.safetensors")).stat().st_size > 24 * (32 << 20)
