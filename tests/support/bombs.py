"""Small files that expand to large data, as an untrusted source may put them into folders of
models, runs or questions.
"""

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

DEEP = 100_000
GIB = 1 << 30


def write_sparse_file(path: Path, size: int, prefix: bytes = b"") -> None:
    path.write_bytes(prefix)
    os.truncate(path, size)


def parquet_of_one_text(path: Path, *, rows: int = 400) -> None:
    """Write 400 rows that refer to one dictionary entry of 1 MiB of text (security.md 10)."""
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["x" * (1 << 20)]))
    pq.write_table(pa.table({"question": text}), path, compression="zstd", store_schema=False)


def parquet_of_one_list(path: Path) -> None:
    """Write one row with a list of 2**25 zeros, which are 256 MiB as integers."""
    zeros = pa.array(np.zeros(1 << 25, np.int64))
    lists = pa.ListArray.from_arrays(pa.array([0, 1 << 25], pa.int32()), zeros)
    pq.write_table(pa.table({"question": lists}), path, compression="zstd")


def parquet_of_nulls(path: Path) -> None:
    """Write five million rows of nulls."""
    pq.write_table(pa.table({"question": pa.nulls(5_000_000, pa.int8())}), path, compression="zstd")


def arrow_of_one_column(path: Path) -> None:
    """Write 256 MiB of zeros, compressed."""
    table = pa.table({"question": pa.array(np.zeros(1 << 25, np.int64))})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)


def arrow_of_nulls(path: Path) -> None:
    """Write 2**31 - 2 rows of nulls in 400 bytes."""
    batch = pa.RecordBatch.from_arrays([pa.Array.from_buffers(pa.null(), 2**31 - 2, [None])], ["question"])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def arrow_out_of_bounds(path: Path) -> None:
    """Write a string whose end offset lies 1 GiB past its column."""
    batch = pa.RecordBatch.from_arrays([pa.array(["a", "b"])], ["question"])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    before, _, after = path.read_bytes().rpartition(struct.pack("<iii", 0, 1, 2))
    path.write_bytes(before + struct.pack("<iii", 0, 1, GIB) + after)


def json_of_depth(path: Path, depth: int = 900) -> None:
    """Write JSON that Python's parser accepts but that recursive functions cannot traverse
    (security.md 24).
    """
    path.write_text('{"question": "q", "answer": "a", "deep": ' + "[" * depth + "]" * depth + "}\n")


def jpeg_of_scans(path: Path, *, side: int = 4000, scans: int = 3000) -> None:
    """Write a progressive JPEG of 60 KB that repeats its last scan `scans` times."""
    encoded = io.BytesIO()
    Image.new("L", (side, side), 90).save(encoded, "JPEG", progressive=True)
    data = encoded.getvalue()
    last = data.rindex(b"\xff\xda")
    path.write_bytes(data[:-2] + data[last:-2] * scans + data[-2:])


def torch_file(path: Path, content: bytes, *, storages: dict[str, bytes] | None = None, compressed: bool = False) -> None:
    """Write a file in the format of torch.save with this pickle."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/version", b"3\n")
        for name, data in (storages or {}).items():
            archive.writestr(f"archive/data/{name}", data)


def tensor_pickle(size: tuple[int, ...], stride: tuple[int, ...], *, numel: int) -> bytes:
    """Return the pickle that torch.save writes for {"w": a float tensor that is a view of storage
    0}.
    """

    def ints(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"\x8a\x08" + value.to_bytes(8, "little") for value in values) + b"t"

    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0" + b"0X\x03\0\0\0cpu\x8a\x08" + numel.to_bytes(8, "little") + b"tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    rebuilt = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0" + ints(size) + ints(stride) + b"\x89" + hooks + b"tR"
    return b"\x80\x02}X\x01\0\0\0w" + rebuilt + b"s."


def torch_of_strides(path: Path) -> None:
    """Write a tensor with two rows that lie 4 TB apart (security.md 25)."""
    torch_file(path, tensor_pickle((2, 2), (10**12, 1), numel=4), storages={"0": bytes(16)})


def torch_of_zeros(path: Path) -> None:
    """Write a pickle of 256 MiB, deflated to 256 KB."""
    torch_file(path, b"\x80\x02B" + struct.pack("<I", GIB >> 2) + bytes(GIB >> 2) + b".", compressed=True)


def torch_of_a_bytearray(path: Path) -> None:
    torch_file(path, b"\x80\x02cbuiltins\nbytearray\nJ" + struct.pack("<i", GIB >> 1) + b"\x85R.")


def torch_of_copies(path: Path) -> None:
    """Write one list of 20,000 pairs and 300 OrderedDicts that are created from it."""
    pairs = b"](" + b"".join(b"(J" + struct.pack("<i", number) + b"Kat" for number in range(20_000)) + b"eq\x01"
    torch_file(path, b"\x80\x02](" + pairs + b"ccollections\nOrderedDict\nq\x020" + b"h\x02h\x01\x85R" * 300 + b"e.")


MEMO_PICKLE = b"\x80\x02Nr" + struct.pack("<I", 1 << 26) + b"."
"""Pickle that stores None at a memo index for which the C unpickler allocates 1 GiB."""
NESTED_KEY_PICKLE = b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns."
"""Pickle of a dict whose key is a million nested tuples."""


def safetensors_of_names(path: Path) -> None:
    """Write a header of 45 MB with 600,000 empty tensors."""
    header = json.dumps({f"w{number:06}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(600_000)}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def yaml_of_aliases(path: Path) -> None:
    """Write ten lines that expand to 10**9 words."""
    lines = ["a0: &a0 [w, w, w, w, w, w, w, w, w, w]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 9)]
    path.write_text("\n".join(lines) + "\nrun: {steps: *a8}\n")


def metadata_of_chunks(path: Path, *, chunks: int = 20_000) -> None:
    """Write the metadata of a tensor with 20,000 chunks, for which a quadratic comparison of chunks
    takes too long (security.md 25).
    """
    from torch import Size
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

    boxes = [ChunkStorageMetadata(Size([0, number]), Size([4, 1])) for number in range(chunks)]
    entry = TensorStorageMetadata(TensorProperties(), Size([4, chunks]), boxes)
    place = _StorageInfo("__0_0.distcp", 0, 16)
    path.write_bytes(pickle.dumps(Metadata({"w": entry}, storage_data={MetadataIndex("w", box.offsets): place for box in boxes})))


PARQUETS: dict[str, Callable[[Path], None]] = {"one text": parquet_of_one_text, "one list": parquet_of_one_list, "nulls": parquet_of_nulls}
TORCH: dict[str, Callable[[Path], None]] = {
    "strides": torch_of_strides, "deflated": torch_of_zeros, "bytearray": torch_of_a_bytearray, "copies": torch_of_copies,
}  # fmt: skip
