"""The streaming writer of safetensors folders: files as Qwen names them, read by safetensors itself, in bounded memory."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megatron_rl.weights.formats import write_hf
from megatron_rl.weights.formats.folders import whole_or_absent
from megatron_rl.weights.formats.write_hf import write_hf_folder
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
    """The header of 43 tensors takes some 3500 bytes; there is room for half of them."""
    monkeypatch.setattr(write_hf, "HEADER_BYTES", 2000)
    monkeypatch.setattr(write_hf, "MAX_ENTRY_BYTES", 200)
    write_hf_folder(tmp_path / "out", some_tensors(), like=like)
    found = {name: tensor for path in sorted((tmp_path / "out").glob("*.safetensors")) for name, tensor in load_file(path).items()}
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3
    assert found.keys() == dict(some_tensors()).keys() and all(torch.equal(found[name], tensor) for name, tensor in some_tensors())


def test_a_check_sees_the_whole_folder_and_can_refuse_it(like: Path, tmp_path: Path) -> None:
    def check(folder: Path) -> None:
        assert json.loads((folder / "config.json").read_text()) == {"new": 1}
        assert len(load_file(next(folder.glob("*.safetensors")))) == 43
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        write_hf_folder(tmp_path / "out", some_tensors(), like=like, config={"new": 1}, check=check)
    assert [path.name for path in tmp_path.iterdir()] == ["like"]


def test_a_folder_that_is_replaced_is_never_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the second of the two renames fails, and where the process was killed between them; then a new one can take its place."""
    out, rename = tmp_path / "out", Path.rename
    out.mkdir()
    (out / "old").touch()

    def fails(self: Path, target: Path) -> Path:
        if self.name == ".out.partial":
            raise OSError("no more renames")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="no more renames"), whole_or_absent(out):
        (tmp_path / ".out.partial").touch()
    monkeypatch.undo()
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["out", "out/old"]
    out.rename(tmp_path / ".out.replaced")
    with pytest.raises(ValueError, match="refused"), whole_or_absent(out):
        raise ValueError("refused")
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["out", "out/old"]
    with whole_or_absent(out) as partial:
        (partial / "new").touch()
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["out", "out/new"]


def test_parents_that_were_made_for_nothing_go(tmp_path: Path) -> None:
    """But those that were there, or that hold something by now, stay."""
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="refused"), whole_or_absent(tmp_path / "there" / "a" / "b" / "out"):
        raise ValueError("refused")
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]

    def refused_beside_a_file() -> None:
        with whole_or_absent(tmp_path / "there" / "a" / "b" / "out"):
            (tmp_path / "there" / "a" / "mine").touch()
            raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        refused_beside_a_file()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "mine", "there"]


@pytest.mark.parametrize("damage", ["a byte more", "another shape", "another name"])
def test_a_file_that_reads_back_differently_is_an_error(like: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    """As if the disk had not kept what was written."""
    close = write_hf._Shard.close

    def damaged(shard: write_hf._Shard) -> None:
        close(shard)
        data = shard.path.read_bytes()
        changed = {
            "a byte more": data + b"0",
            "another shape": data.replace(b"[7, 3]", b"[3, 7]"),
            "another name": data.replace(b"layer.0.", b"layer.x."),
        }
        assert changed[damage] != data
        shard.path.write_bytes(changed[damage])

    monkeypatch.setattr(write_hf._Shard, "close", damaged)
    with pytest.raises(OSError, match=re.escape("model-00001-of-00001.safetensors: ")):
        write_hf_folder(tmp_path / "out", some_tensors(), like=like)
    assert not (tmp_path / "out").exists()


def test_memory_does_not_grow_with_the_file(like: Path, tmp_path: Path) -> None:
    """768 MB in tensors of 32 MB, one file: the peak grows by two, for a moment three (measured: 73 to 98 MiB), not by a file."""
    code = """
import resource, sys, torch
from pathlib import Path
from megatron_rl.weights.formats.write_hf import write_hf_folder
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
