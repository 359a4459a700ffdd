"""Cuts vLLM 0.32.0's CUDA wheel into two zips of less than 64 MiB each.

    python benchmarks/gpu/slices.py .gpu/src/vllm-0.32.0-*.whl .gpu

The zips hold only what a dense model in bfloat16 on sm90 needs. README.md in this folder explains
how to download the wheel. Writes a/vllm_a.zip (the kernels) and b/vllm_b.zip (flash attention 3,
the sleep-mode allocator, all Python) below the folder. Left out are flash attention 2 (its import
is in a try block), expert kernels, deep_gemm, the Rust server and headers.
"""

import argparse
import zipfile
from pathlib import Path

LIMIT = 64 << 20
KERNELS = "vllm/_C_stable_libtorch.abi3.so"
LIBRARIES = {
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "vllm/cumem_allocator.abi3.so", "vllm/spinloop.abi3.so", "vllm/fs_io_C.abi3.so",
}  # fmt: skip


def is_in_second(name: str) -> bool:
    """Return True if a file of the wheel belongs to the second zip."""
    if name.endswith(".so"):
        return name in LIBRARIES
    return not (name.endswith("/") or name == "vllm/vllm-rs" or "/include/" in name or "/static/" in name)


def cut(wheel: Path, folder: Path) -> list[Path]:
    """Write the two zips and return their paths. Raises ValueError if the wheel lacks a library."""
    with zipfile.ZipFile(wheel) as source:
        names = source.namelist()
        lacking = sorted({KERNELS, *LIBRARIES}.difference(names))
        if lacking:
            raise ValueError(f"{wheel} has no {', '.join(lacking)}: cut by the list of vLLM 0.32.0")
        parts = {folder / "a" / "vllm_a.zip": [KERNELS], folder / "b" / "vllm_b.zip": [name for name in names if is_in_second(name)]}
        for path, kept in parts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as out:
                for name in kept:
                    out.writestr(name, source.read(name))
    return list(parts)


def main() -> None:
    """Cut the wheel and print the sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    for path in cut(given.wheel, given.folder):
        size = path.stat().st_size
        print(f"{path}: {size / 2**20:.1f} MiB{'' if size < LIMIT else ', MORE than the 64 MiB that a call carries'}")


if __name__ == "__main__":
    main()
