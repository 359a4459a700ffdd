"""Malicious files, such as small files that expand to large data and files with false headers."""

import json
import os
import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models

GIB = 1 << 30
PNG = b"\x89PNG\r\n\x1a\n"


def sparse(path: Path, begin: bytes = b"", *, size: int = 100 * GIB) -> Path:
    """Create a sparse file that starts with `begin` and has `size` bytes."""
    path.write_bytes(begin)
    os.truncate(path, size)
    return path


def fifo(path: Path) -> Path:
    """Create a FIFO at `path`."""
    os.mkfifo(path)
    return path


def link(path: Path, target: str) -> Path:
    """Create a symbolic link from `path` to `target`."""
    path.symlink_to(target)
    return path


def text(path: Path, content: str) -> Path:
    """Create a text file with this content."""
    path.write_text(content)
    return path


def png(path: Path, side: int = 12_000) -> Path:
    """Create a PNG of 144 megapixels with one bit per pixel.

    Pillow warns about this image but decodes it. The file has 20 KB; the image takes 576 MB as RGB.
    """
    content = zlib.compress((bytes(1 + side // 8)) * side)
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", content), (b"IEND", b"")]
    chunks = [struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts]
    path.write_bytes(PNG + b"".join(chunks))
    return path


def merges(path: Path, levels: int = 12) -> Path:
    """Create a YAML file with nested merge keys.

    Each level merges the previous level six times.
    """
    lines = ["l0: &l0 {a: 1, b: 2, c: 3}"]
    lines += [f"l{n}: &l{n} {{<<: [*l{n - 1}, *l{n - 1}, *l{n - 1}, *l{n - 1}, *l{n - 1}, *l{n - 1}]}}" for n in range(1, levels)]
    return text(path, "\n".join(lines) + "\n")


def step_of_many_rows(path: Path) -> Path:
    """Create a Parquet file of 40 KB with a million rows that all contain the same text of 2 KB."""
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(1_000_000, np.int32)), pa.array(["x" * 2000]))
    pq.write_table(pa.table({"task": text}), path, compression="zstd", store_schema=False)
    return path


def safetensors(path: Path, header: dict, *, data: int) -> Path:
    """Create a safetensors file with this header and `data` bytes of zeros."""
    content = json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + bytes(data))
    return path


def tokenizer(path: Path) -> Path:
    """Create a tokenizer file with a decoder that doubles the length of a token 40 times."""
    made = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    made.decoder = decoders.Sequence([decoders.Replace("a", "aa")] * 40)
    made.save(str(path))
    return path


class Opens:
    """Object that opens a file for writing when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple:
        return open, (self._path, "w")


def pickled(path: Path, *, opens: Path) -> Path:
    """Create a pickle file that opens the file `opens` for writing when it is loaded."""
    path.write_bytes(pickle.dumps({"state": Opens(opens)}))
    return path
