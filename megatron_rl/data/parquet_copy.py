"""A program of its own: copies a Parquet file to an Arrow file of one record a row, under limits that the kernel keeps.

usage: parquet_copy.py SOURCE COPY      (rows.py starts it; it imports nothing of this project)

A page of Parquet may stand for any number of bytes (1 KB of zstd for 2.5 GB), and a file that lies about its sizes is no rarer than one
that is honest, so that neither is believed: memory, disk and processor time are limited by what the file itself takes on the disk.
"""

import os
import resource
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

MEMORY_BYTES, MEMORY_FACTOR = 192 << 20, 8
"""What reading may take beside the interpreter: so much, and so many times the file."""
COPY_BYTES, COPY_FACTOR = 100 << 20, 200
"""The largest copy: text compresses, and a question's constant words most of all."""
ROW_BYTES, ROW_FACTOR = 16 << 20, 8
"""The largest row: its pictures do not compress."""
CPU_S, BYTES_PER_CPU_S = 10, 100_000
MAX_NESTING = 32
"""Structs and lists within one another."""
_CHUNK = 1 << 20
_FULL_SHARE = 2
"""Of the disk's free space at most one part in so many."""


def limit_resources(file_bytes: int, folder: Path) -> None:
    """From here on, this process can do no more than a file of this size may need."""
    status = Path("/proc/self/status").read_text().split()
    taken = int(status[status.index("VmData:") + 1]) << 10
    disk = os.statvfs(folder)
    largest = min(COPY_BYTES + COPY_FACTOR * file_bytes, disk.f_bavail * disk.f_frsize // _FULL_SHARE)
    for kind, most in (
        (resource.RLIMIT_DATA, taken + MEMORY_BYTES + MEMORY_FACTOR * file_bytes),
        (resource.RLIMIT_FSIZE, largest),
        (resource.RLIMIT_CPU, CPU_S + file_bytes // BYTES_PER_CPU_S),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def type_depth(kind: pa.DataType) -> int:
    return 1 + max((type_depth(kind.field(number).type) for number in range(kind.num_fields)), default=0)


def copy_to_arrow(source: Path, target: Path) -> None:
    size = source.stat().st_size
    limit_resources(size, target.parent)
    file = pq.ParquetFile(source, pre_buffer=False, buffer_size=_CHUNK)
    fields = file.schema_arrow  # an Arrow file has one dictionary a column, a Parquet file one a row group: values instead
    schema = pa.schema([field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field for field in fields])
    schema = schema.with_metadata(fields.metadata)  # `datasets` writes there what columns hold (features.py)
    if max((type_depth(field.type) for field in schema), default=0) > MAX_NESTING:
        raise ValueError(f"its columns are nested deeper than {MAX_NESTING}")
    meta = file.metadata
    stored = sum(meta.row_group(index).total_byte_size for index in range(meta.num_row_groups))
    num_rows = min(max(_CHUNK * meta.num_rows // max(stored, 1), 1), 1024)
    with pa.ipc.new_file(str(target), schema) as writer:
        for encoded in file.iter_batches(batch_size=num_rows, use_threads=False):
            batch = encoded.cast(schema)
            for index in range(batch.num_rows):
                row = batch.slice(index, 1)
                if row.nbytes > ROW_BYTES + ROW_FACTOR * size:
                    raise ValueError(f"a row of {row.nbytes} bytes in a file of {size}")
                writer.write_batch(row)


def main() -> int:
    pa.set_memory_pool(pa.system_memory_pool())  # the others take address space ahead of need, and so does each thread
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    try:
        copy_to_arrow(Path(sys.argv[1]), Path(sys.argv[2]))
    except (pa.ArrowException, OSError, ValueError, MemoryError, RecursionError) as error:
        print(" ".join(str(error).split())[:300] or type(error).__name__, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
