"""Standalone program that copies a Parquet file to an Arrow file under kernel resource limits.

usage: parquet_copy.py SOURCE COPY

The Arrow file has one record batch per row. This program is started by rows.py and imports nothing
from this project. A Parquet page may decompress to any size (for example, 1 KB of zstd data to 2.5
GB), and the sizes stated in a file may be wrong. Memory, disk space and CPU time are therefore
limited in proportion to the size of the file on disk.
"""

import os
import resource
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

MEMORY_BYTES, MEMORY_FACTOR = 192 << 20, 8
"""Memory limit for reading, on top of the interpreter's own memory.

The limit is a constant in bytes plus a multiple of the file size.
"""
COPY_BYTES, COPY_FACTOR = 100 << 20, 200
"""Maximum size of the copy: a constant in bytes plus a multiple of the file size.

The factor is large because text compresses well, especially wording that is repeated in every
question.
"""
ROW_BYTES, ROW_FACTOR = 16 << 20, 8
"""Maximum size of a row: a constant in bytes plus a multiple of the file size.

The factor can be small because images do not compress.
"""
CPU_S, BYTES_PER_CPU_S = 10, 100_000
MAX_NESTING = 32
"""Maximum nesting depth of structs and lists."""
_CHUNK = 1 << 20
_FULL_SHARE = 2
"""Divisor of the free disk space: with a value of 2, the copy may use at most half of it."""


def limit_resources(file_bytes: int, folder: Path) -> None:
    """Limit the memory, file size and CPU time of this process in proportion to the file size."""
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
    """Return the nesting depth of an Arrow type; 1 for a type without fields."""
    return 1 + max((type_depth(kind.field(number).type) for number in range(kind.num_fields)), default=0)


def copy_to_arrow(source: Path, target: Path) -> None:
    """Copy a Parquet file to an Arrow file with one record batch per row.

    Raises:
        ValueError: the columns are nested too deeply, or a row is too large in relation to the
            file.
    """
    size = source.stat().st_size
    limit_resources(size, target.parent)
    file = pq.ParquetFile(source, pre_buffer=False, buffer_size=_CHUNK)
    fields = file.schema_arrow  # an Arrow file allows one dictionary per column, Parquet one per row group
    schema = pa.schema([field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field for field in fields])
    schema = schema.with_metadata(fields.metadata)  # `datasets` stores the column types there (features.py)
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
                    raise ValueError(f"a row has {row.nbytes} bytes, which is too large for a file of {size} bytes")
                writer.write_batch(row)


def main() -> int:
    """Copy the file named on the command line and return the exit status."""
    pa.set_memory_pool(pa.system_memory_pool())  # other pools and extra threads reserve address space in advance
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
