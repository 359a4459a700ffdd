"""Reading folders of safetensors, completeness checked."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megatron_rl.models.mapping import canonical
from megatron_rl.weights.formats.reading import mapped
from megatron_rl.weights.formats.write_hf import DTYPES, INDEX


class HfTensors:
    """The tensors of a Hugging Face folder by canonical name, read one at a time.

    Headers are checked at once. Raises ValueError under the setting's or option's name `key`.
    """

    def __init__(self, folder: str | Path, *, key: str = "model.path", once: bool = False) -> None:
        """`once`: each tensor is read once, by this process alone (reading.mapped)."""
        self.folder, self.key, self._once = Path(folder), key, once
        self._tensors: dict[str, _Stored] = {}
        index = self._index()
        for path in self._weight_files(index):
            for stored in self._stored_in(path):
                name = canonical(stored.name)
                if name in self._tensors:
                    first = self._tensors[name].path.name
                    raise self._error(f"tensor {stored.name} stands in {first} and in {path.name}; remove one of the two")
                self._tensors[name] = stored
        listed = {canonical(name): file for name, file in index.items()}
        present = {name: stored.path.name for name, stored in self._tensors.items()}
        differ = sorted(name for name in listed.keys() | present.keys() if index and listed.get(name) != present.get(name))
        if differ:
            places = f"says {listed.get(differ[0], 'nothing')}, the files say {present.get(differ[0], 'nowhere')}"
            raise self._error(f"{INDEX} and the files differ in {len(differ)} tensors; of {differ[0]} it {places}; copy it all again")

    def _error(self, what: str) -> ValueError:
        return ValueError(f"{self.key}={self.folder}: {what}")

    def _index(self) -> dict[str, str]:
        """{tensor: file}, as stored; empty without an index."""
        path = self.folder / INDEX
        try:
            index = dict(json.loads(path.read_text())["weight_map"]) if path.exists() else {}
        except (ValueError, KeyError, TypeError) as error:
            raise self._error(f"{INDEX} is damaged ({error}); copy it again") from error
        wrong = next((name for name, file in index.items() if not isinstance(file, str) or not file or "\0" in file), None)
        if wrong is not None:
            raise self._error(f"{INDEX} is damaged ({wrong} is in {index[wrong]!r}, which is no file's name); copy it again")
        return index

    def _weight_files(self, index: dict[str, str]) -> list[Path]:
        files = sorted({self.folder / file for file in index.values()}) or sorted(self.folder.glob("*.safetensors"))
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise self._error(f"{INDEX} names {', '.join(missing)}, not in the folder; copy the whole checkpoint")
        if not files and any(self.folder.glob("*.bin")):
            raise self._error("its weights are *.bin pickles, which can run code; save it as safetensors first (save_pretrained)")
        if not files:
            raise self._error("no *.safetensors file in it; give a Hugging Face model folder")
        return files

    def _stored_in(self, path: Path) -> list["_Stored"]:
        """The tensors of one file. Safetensors checks it: the header, the sizes, the file's length, and that there are no gaps."""
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise self._error(f"{path.name} is corrupt ({error}); copy it again") from error
        with path.open("rb") as file:
            data = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(data - 8))
        header.pop("__metadata__", None)
        unknown = sorted({entry["dtype"] for entry in header.values()} - DTYPES.keys())
        if unknown:
            raise self._error(f"{path.name} holds numbers of type {unknown[0]}; quantized checkpoints cannot be trained")
        return [
            _Stored(path, name, torch.Size(entry["shape"]), DTYPES[entry["dtype"]], data + entry["data_offsets"][0])
            for name, entry in header.items()
        ]

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> torch.Size:
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def stored_name(self, name: str) -> str:
        """The file's own spelling of a canonical name."""
        return self._tensors[name].name

    def read(self, name: str) -> torch.Tensor:
        """The tensor of that canonical name, on CPU in the stored dtype; its part of the file is mapped for as long as it lives."""
        stored = self._tensors[name]
        return mapped(stored.path, offset=stored.offset, dtype=stored.dtype, shape=stored.shape, once=self._once)


@dataclass(slots=True, frozen=True)
class _Stored:
    path: Path
    name: str
    shape: torch.Size
    dtype: torch.dtype
    offset: int
    """In the file."""
