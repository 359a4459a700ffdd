"""Prints how many bytes stay resident after 60 blocks of 6 MB with smaller blocks between them were
freed. Run by test_world.py.

    heap_fragmentation.py [returned]
"""

import ctypes
import re
import sys
from pathlib import Path

from megatron_rl.distributed.world import trim_malloc

BLOCK_BYTES, SMALL_BLOCK_BYTES = 6 << 20, 1 << 16


def resident_bytes() -> int:
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def main() -> None:
    heap = ctypes.CDLL(None)
    heap.malloc.restype, heap.malloc.argtypes, heap.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    if sys.argv[1:] == ["returned"]:
        trim_malloc()
    heap.free(heap.malloc(31 << 20))  # from now on, malloc uses no separate mapping for blocks up to 31 MB
    for _ in range(4000):
        heap.malloc(SMALL_BLOCK_BYTES)  # fills the free memory of the heap, which is between other blocks
    before, blocks = resident_bytes(), []
    for _ in range(60):
        blocks.append(heap.malloc(BLOCK_BYTES))
        ctypes.memset(blocks[-1], 1, BLOCK_BYTES)
        ctypes.memset(heap.malloc(SMALL_BLOCK_BYTES), 1, SMALL_BLOCK_BYTES)
    assert resident_bytes() - before > 50 * BLOCK_BYTES  # the heap may have had free memory before
    for block in blocks:
        heap.free(block)
    print(resident_bytes() - before - 60 * SMALL_BLOCK_BYTES)


if __name__ == "__main__":
    main()
