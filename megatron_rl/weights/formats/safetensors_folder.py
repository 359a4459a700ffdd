"""Reader and writer of Hugging Face folders with safetensors files.

A safetensors file consists of an 8-byte little-endian length, a JSON header of that length (which
may end in spaces), and the tensors' data in header order without gaps (safetensors 0.6, README.md,
Format). The reader checks that headers and index are complete and consistent. The writer reserves
space for the header and writes the header last, so that the tensors need not be known in advance.
Two or three tensors are in memory at a time. Headers are read back before the folder is renamed to
its final name.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megatron_rl.io.jsonl import read_json
from megatron_rl.models.name_mapping import canonical_name
from megatron_rl.weights.formats.checkpoint_source import TensorSpec
from megatron_rl.weights.formats.tensor_files import FlushedFile, atomic_folder, copy_companions, is_file_name, list_companions, map_tensor

INDEX_FILE = "model.safetensors.index.json"
"""Name of the index file, which maps tensor names to file names."""
HEADER_BYTES = 1 << 16
"""Number of bytes reserved for the header of a written file, enough for about 400 tensors. A new
file is started when the current file has no space left in its header or has reached the maximum
size.
"""
MAX_HEADER_BYTES = 8 << 20
"""Maximum accepted header size in bytes when reading a file, enough for about 80,000 tensors."""
MAX_ENTRY_BYTES = 1 << 10
"""Number of free header bytes required to add a tensor to a file; every header entry is smaller."""
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""Supported dtypes, keyed by their names in safetensors."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Names of the supported dtypes in safetensors, keyed by torch dtype."""


def find_missing_file(folder: Path) -> str:
    """Return the first required file that is missing from a Hugging Face folder, or "".

    Required files are config.json, the files listed in the index, and at least one weight file. An
    invalid index is treated as missing.
    """
    if not (folder / "config.json").is_file():
        return "config.json"
    try:
        index = read_json(folder / INDEX_FILE)["weight_map"] if (folder / INDEX_FILE).is_file() else {}
        names = sorted(filter(is_file_name, index.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        return INDEX_FILE
    if not names:
        return "" if any(folder.glob("*.safetensors")) else "*.safetensors"
    return next((name for name in names if not (folder / name).is_file()), "")


@dataclass(slots=True, frozen=True)
class _Entry:
    """Header entry of one tensor in a file."""

    path: Path
    name: str
    """Name of the tensor as stored in the file."""
    spec: TensorSpec
    offset: int
    """Position of the tensor's data in the file, in bytes."""


class HfTensors:
    """Tensors of a Hugging Face folder, read one at a time by canonical name.

    The constructor checks the headers and the index. Raises ValueError if the folder is incomplete
    or damaged; the message names `key`, the setting or option that contains the folder.
    """

    specs: Mapping[str, TensorSpec]

    def __init__(self, folder: str | Path, *, key: str = "model.path", read_once: bool = False) -> None:
        """Read and check the headers and the index.

        Set `read_once` to True if each tensor is read only once, and only by this process; see
        tensor_files.map_tensor.
        """
        self.folder, self.key, self._read_once = Path(folder), key, read_once
        self._tensors: dict[str, _Entry] = {}
        list_companions(self.folder)  # raises now instead of at the first checkpoint, which copies them
        index = self._index()
        for path in self._weight_files(index):
            for stored in self._read_entries(path):
                name = canonical_name(stored.name)
                if name in self._tensors:
                    first = self._tensors[name].path.name
                    raise self._error(f"tensor {stored.name} is in {first} and in {path.name}; remove one of the two")
                self._tensors[name] = stored
        listed = {canonical_name(name): file for name, file in index.items()}
        present = {name: stored.path.name for name, stored in self._tensors.items()}
        differ = sorted(name for name in listed.keys() | present.keys() if index and listed.get(name) != present.get(name))
        if differ:
            places = f"(index: {listed.get(differ[0], 'nothing')}, files: {present.get(differ[0], 'nowhere')})"
            raise self._error(
                f"{INDEX_FILE} and the weight files disagree on {len(differ)} tensors, for example {differ[0]} {places}; "
                "copy the whole checkpoint"
            )
        self.specs = {name: self._tensors[name].spec for name in sorted(self._tensors)}

    def _error(self, what: str) -> ValueError:
        return ValueError(f"{self.key}={self.folder}: {what}")

    def _index(self) -> dict[str, str]:
        """Return the stored index {tensor name: file name}, or {} if the folder has no index."""
        path = self.folder / INDEX_FILE
        try:
            index = dict(read_json(path)["weight_map"]) if path.is_file() else {}
        except (ValueError, KeyError, TypeError) as error:
            raise self._error(f"{INDEX_FILE} is damaged ({error}); copy it again") from error
        wrong = next((name for name, file in index.items() if not is_file_name(file)), None)
        if wrong is not None:
            raise self._error(f"{INDEX_FILE} is damaged ({wrong} is in {index[wrong]!r}, which is not a file name); copy it again")
        return index

    def _weight_files(self, index: dict[str, str]) -> list[Path]:
        files = sorted({self.folder / file for file in index.values()}) or sorted(filter(Path.is_file, self.folder.glob("*.safetensors")))
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise self._error(
                f"{INDEX_FILE} lists {', '.join(missing)}, but the folder does not contain these files; copy the whole checkpoint"
            )
        if not files and any(self.folder.glob("*.bin")):
            raise self._error("its weights are *.bin pickles, which can run code; save the model as safetensors first (save_pretrained)")
        if not files:
            raise self._error("contains no *.safetensors file; use a Hugging Face model folder")
        return files

    def _read_entries(self, path: Path) -> list[_Entry]:
        """Return the header entries of one file.

        The safetensors library checks the header, the tensor sizes and the file length, and rejects
        gaps in the data.
        """
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise self._error(
                f"{path.name} is corrupt (the header has {length} bytes, more than the maximum of {MAX_HEADER_BYTES}); copy it again"
            )
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise self._error(f"{path.name} is corrupt ({error}); copy it again") from error
        with path.open("rb") as file:
            header = json.loads(file.read(8 + length)[8:])
        header.pop("__metadata__", None)
        unknown = sorted({entry["dtype"] for entry in header.values()} - DTYPES.keys())
        if unknown:
            raise self._error(f"{path.name} contains numbers of type {unknown[0]}; quantized checkpoints cannot be trained")
        return [
            _Entry(path, name, TensorSpec(DTYPES[entry["dtype"]], torch.Size(entry["shape"])), 8 + length + entry["data_offsets"][0])
            for name, entry in header.items()
        ]

    def locate(self, name: str) -> str:
        """Return the folder, for error messages."""
        return str(self.folder)

    def stored_name(self, name: str) -> str:
        """Return the name under which a tensor is stored, given its canonical name."""
        return self._tensors[name].name

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor with this canonical name, on the CPU and in the stored dtype.

        The tensor's part of the file remains memory-mapped as long as the tensor exists.
        """
        stored = self._tensors[name]
        return map_tensor(stored.path, offset=stored.offset, dtype=stored.spec.dtype, shape=stored.spec.shape, read_once=self._read_once)


def write_hf_folder(
    out: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    like: Path,
    shard_bytes: int = 4 << 30,
    config: dict | None = None,
    check: Callable[[Path], None] | None = None,
    pixels: tuple[int, int] | None = None,
    card: str = "",
) -> list[str]:
    """Write a complete Hugging Face folder at `out`, atomically.

    The folder contains `tensors`, and the config, tokenizer and processor files of `like`. The
    folder is written under a temporary name, verified (headers are read back), flushed to disk and
    finally renamed, so that `out` is never incomplete.

    Args:
        out: The new folder. An existing folder is replaced.
        tensors: Names and tensors, consumed one at a time.
        like: Hugging Face folder from which all other files are copied.
        shard_bytes: Maximum size of a weight file in bytes.
        config: Content of config.json; None keeps the config.json of `like`.
        check: Function called with the folder before it is renamed; it raises an exception to
            reject the folder.
        pixels: Minimum and maximum number of pixels per image; see copy_companions.
        card: Text of README.md; an empty string keeps the README.md of `like`.

    Returns:
        Components that `like` lacks, such as "tokenizer" or "processor".

    Raises:
        OSError: Writing failed (disk full, no permission). The unfinished folder is removed; this
            also happens if `tensors` or `check` raises an exception.
    """
    with atomic_folder(out) as partial:
        _write_shards(partial, tensors, shard_bytes)
        lacking = copy_companions(like, partial, pixels=pixels)
        if card:
            (partial / "README.md").write_text(card)
        if config is not None:
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if check is not None:
            check(partial)
    return lacking


class _Shard:
    """Safetensors file that is being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = FlushedFile(path)
        self.file.seek(8 + HEADER_BYTES)
        self.header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        self.header_bytes = 64
        self.size = 0

    def has_room(self, nbytes: int, shard_bytes: int) -> bool:
        """Return True if the next tensor fits into the file; the first tensor always fits."""
        return self.size == 0 or (self.size + nbytes <= shard_bytes and self.header_bytes + MAX_ENTRY_BYTES <= HEADER_BYTES)

    def reserve(self, name: str, tensor: torch.Tensor) -> None:
        """Add the next tensor to the header."""
        end = self.size + tensor.nbytes
        entry = {name: {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [self.size, end]}}
        self.header.update(entry)
        self.size = end
        self.header_bytes += len(json.dumps(entry))

    def close(self) -> None:
        """Write the header, flush the file to disk and close it."""
        header = json.dumps(self.header).encode()
        assert len(header) <= HEADER_BYTES, f"{self.path.name}: its header has {len(header)} bytes"
        self.file.seek(0)
        self.file.write(HEADER_BYTES.to_bytes(8, "little") + header.ljust(HEADER_BYTES))
        self.file.finish()


def _write_shards(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> None:
    """Write all tensors to numbered files, verify the files and write the index.

    A thread writes one tensor while the next tensor is computed.
    """
    shards: list[_Shard] = []
    names: set[str] = set()
    pending: Future[None] | None = None
    with ThreadPoolExecutor(1) as writer, ExitStack() as files:
        for name, tensor in tensors:
            assert name not in names, f"{name} was exported twice"
            names.add(name)
            if pending is not None:
                pending.result()
            if not shards or not shards[-1].has_room(tensor.nbytes, shard_bytes):
                if shards:
                    shards[-1].close()
                shards.append(_Shard(folder / f"model-{len(shards) + 1:05d}.safetensors"))
                files.callback(shards[-1].file.close)
            shards[-1].reserve(name, tensor)
            pending = writer.submit(shards[-1].file.write_tensor, tensor.detach().to("cpu"))
        if pending is not None:
            pending.result()
            shards[-1].close()
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard.path = shard.path.rename(folder / file)
        _verify_shard(shard)
        weight_map |= dict.fromkeys(_tensor_names(shard), file)
    total = sum(shard.size for shard in shards)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _tensor_names(shard: _Shard) -> list[str]:
    return [name for name in shard.header if name != "__metadata__"]


def _verify_shard(shard: _Shard) -> None:
    """Read the file's header back and compare it with the written tensors.

    The safetensors library rejects files with gaps or a wrong length.
    """
    try:
        with safe_open(shard.path, framework="pt") as file:
            read = {name: (file.get_slice(name).get_dtype(), file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise OSError(f"{shard.path.name}: cannot be read back ({error})") from error
    wanted = {name: (shard.header[name]["dtype"], shard.header[name]["shape"]) for name in _tensor_names(shard)}
    if read != wanted:
        differing = sorted(name for name in read.keys() | wanted.keys() if read.get(name) != wanted.get(name))
        raise OSError(f"{shard.path.name}: the header does not match the written tensors: {', '.join(differing[:4])}")
