"""Unpacks vLLM 0.32.0's CUDA wheel for one GPU architecture, small enough to copy to a machine.

    python benchmarks/gpu/slices.py .gpu/src/vllm-0.32.0-*.whl .gpu/site

The folder then contains everything that a dense bfloat16 model needs on sm_90: the kernels, flash
attention 3, the sleep-mode allocator, and all Python files.

Code for other architectures is overwritten with zeros, which compress to almost nothing; the CUDA
driver reads only the headers of these entries. Flash attention 2 (which vLLM imports in a try
block), expert kernels, deep_gemm, the Rust server and C headers are left out. NVIDIA does not
document the format of a fat binary. This script reads the magic number, kind, sizes and
architecture, and raises an error unless the entries exactly fill their container.
"""

import argparse
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ARCHITECTURE = 90
KERNELS = "vllm/_C_stable_libtorch.abi3.so"
LIBRARIES = {
    KERNELS, "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "vllm/cumem_allocator.abi3.so", "vllm/spinloop.abi3.so", "vllm/fs_io_C.abi3.so",
}  # fmt: skip
CONTAINER = struct.Struct("<IHHQ")
"""Header of a fat binary's container: magic number, version, header size, size of all entries."""
CONTAINER_START = struct.pack("<IHH", 0xBA55ED50, 1, CONTAINER.size)
ENTRY = struct.Struct("<HHIQIIHHI")
"""Start of an entry's header: kind, version, header size, payload size, 4 fields, architecture."""
PTX, MACHINE_CODE = 1, 2


@dataclass(slots=True, frozen=True)
class Entry:
    """Code for one architecture within a container."""

    kind: int
    architecture: int
    start: int
    """Offset of the payload in the library."""
    size: int


def containers(library: bytes) -> Iterator[list[Entry]]:
    """Yield the entries of each container in a library.

    Raises ValueError if a container cannot be parsed.
    """
    at = library.find(CONTAINER_START)
    while at >= 0:
        end = at + CONTAINER.size + CONTAINER.unpack_from(library, at)[3]
        at, entries = at + CONTAINER.size, []
        while at < end:
            kind, _, header, size, *_, architecture = ENTRY.unpack_from(library, at)
            if header < ENTRY.size or at + header + size > end:
                raise ValueError(
                    f"the fat binary ending at byte {end} has an invalid entry: {header} header bytes and {size} payload bytes at byte {at}"
                )
            entries.append(Entry(kind, architecture, at + header, size))
            at += header + size
        yield entries
        at = library.find(CONTAINER_START, end)


def unused_entries(entries: list[Entry], architecture: int) -> list[Entry]:
    """Return the entries that the CUDA driver does not use on a GPU of this architecture.

    The driver uses machine code for the same architecture if present; otherwise, it compiles PTX
    for the same or an older architecture.
    """
    own = [entry for entry in entries if (entry.kind, entry.architecture) == (MACHINE_CODE, architecture)]
    kept = own or [entry for entry in entries if entry.kind == PTX and entry.architecture <= architecture]
    return [entry for entry in entries if entry not in kept]


def prune(library: bytes, architecture: int = ARCHITECTURE) -> bytes:
    """Return a copy of a library with the code for other architectures overwritten with zeros."""
    pruned = bytearray(library)
    for entries in containers(library):
        for entry in unused_entries(entries, architecture):
            pruned[entry.start : entry.start + entry.size] = bytes(entry.size)
    return bytes(pruned)


def is_kept(name: str) -> bool:
    """Return True if this file of the wheel is to be unpacked."""
    if name.endswith(".so"):
        return name in LIBRARIES
    return not (name.endswith("/") or name == "vllm/vllm-rs" or "/include/" in name or "/static/" in name)


def cut(wheel: Path, folder: Path) -> None:
    """Unpack the wheel into a folder.

    Raises ValueError if the wheel lacks a required library.
    """
    with zipfile.ZipFile(wheel) as source:
        names = source.namelist()
        lacking = sorted(LIBRARIES.difference(names))
        if lacking:
            raise ValueError(f"{wheel} has no {', '.join(lacking)}; use the wheel of vLLM 0.32.0")
        for name in filter(is_kept, names):
            path = Path(source.extract(name, folder))
            if name.endswith(".so"):
                path.write_bytes(prune(path.read_bytes()))


def main() -> None:
    """Unpack the wheel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    cut(given.wheel, given.folder)


if __name__ == "__main__":
    main()
