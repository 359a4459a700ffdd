"""Reading and writing folders of safetensors: completeness is checked, nothing half-written can be loaded."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_rl.weights.mapping import canonical

INDEX = "model.safetensors.index.json"


class HfTensors:
    """The tensors of a Hugging Face folder by canonical name, read one at a time."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files: dict[str, tuple[Path, str]] = {}
        for path in self._weight_files():
            for name in _names(path):
                if canonical(name) in self._files:
                    raise ValueError(f"{path}: tensor {name} stands in {self._files[canonical(name)][0].name} as well; remove one of the two files")
                self._files[canonical(name)] = (path, name)

    def _weight_files(self) -> list[Path]:
        index = self.folder / INDEX
        if index.exists():
            files = sorted({self.folder / file for file in json.loads(index.read_text())["weight_map"].values()})
            missing = [file.name for file in files if not file.exists()]
            if missing:
                raise ValueError(f"model.path={self.folder}: {INDEX} names {', '.join(missing)}, not in the folder; copy the whole checkpoint")
            return files
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"model.path={self.folder}: no *.safetensors file in it; give a Hugging Face model folder")
        return files

    def names(self) -> set[str]:
        return set(self._files)

    def read(self, name: str) -> torch.Tensor:
        """The tensor of that canonical name, on CPU in the stored dtype."""
        path, stored = self._files[name]
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(stored)
        except SafetensorError as error:
            raise ValueError(f"model.path={path.parent}: {path.name} is corrupt ({error}); copy it again") from error


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise ValueError(f"model.path={path.parent}: {path.name} is corrupt ({error}); copy it again") from error


def write_hf_folder(out: Path, tensors: Iterator[tuple[str, torch.Tensor]], *, like: Path, shard_bytes: int = 4 << 30) -> None:
    """Write a complete Hugging Face folder at `out`: the tensors, and everything else (config, tokenizer, processor) from `like`.

    It is written beside its final name, flushed to disk, and renamed last, so that a folder called `out` is whole or absent.
    Raises OSError (disk full, no permission); what was written until then is removed.
    """
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_shards(partial, tensors, shard_bytes)
        for path in like.iterdir():
            if path.is_file() and path.suffix != ".safetensors" and path.name != INDEX:
                shutil.copyfile(path, partial / path.name)
        for path in partial.iterdir():
            _flush(path)
        _flush(partial)
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
        _flush(out.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_shards(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], shard_bytes: int) -> None:
    weight_map: dict[str, str] = {}
    total, shard, shard_size, number = 0, {}, 0, 0

    def flush_shard() -> None:
        nonlocal shard, shard_size, number
        number += 1
        file = f"model-{number:05d}.safetensors"
        _save(shard, folder / file)
        weight_map.update(dict.fromkeys(shard, file))
        shard, shard_size = {}, 0

    for name, tensor in tensors:
        assert name not in weight_map and name not in shard, f"{name} was exported twice"
        size = tensor.numel() * tensor.element_size()
        if shard and shard_size + size > shard_bytes:
            flush_shard()
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        shard_size, total = shard_size + size, total + size
    flush_shard()
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
