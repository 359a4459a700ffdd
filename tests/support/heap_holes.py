"""Prints the bytes that 60 freed blocks of 6 MB leave resident where smaller ones lie between them. Run by test_world.py.

heap_holes.py [returned]
"""

import ctypes
import re
import sys
from pathlib import Path

from megatron_rl.distributed.world import trim_malloc

BLOCK, SMALL = 6 << 20, 1 << 16


def resident() -> int:
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def main() -> None:
    heap = ctypes.CDLL(None)
    heap.malloc.restype, heap.malloc.argtypes, heap.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    if sys.argv[1:] == ["returned"]:
        trim_malloc()
    heap.free(heap.malloc(31 << 20))  # from here on the library maps no block of up to 31 MB by itself
    before, blocks = resident(), []
    for _ in range(60):
        blocks.append(heap.malloc(BLOCK))
        ctypes.memset(blocks[-1], 1, BLOCK)
        ctypes.memset(heap.malloc(SMALL), 1, SMALL)
    assert resident() - before > 50 * BLOCK  # the heap may have had some room
    for block in blocks:
        heap.free(block)
    print(resident() - before - 60 * SMALL)


if __name__ == "__main__":
    main()
