"""Flips the signs of numbers in the stored tensors of a checkpoint.

File sizes do not change and all archives stay readable.
"""

import re
from itertools import pairwise
from pathlib import Path

ZIP_HEADER = re.compile(rb"PK\x03\x04|PK\x01\x02|PK\x05\x06|PK\x07\x08")
"""Matches the headers of a zip archive."""


def flip_signs(checkpoint: Path, *, min_bytes: int = 40_000, num_values: int = 4096) -> int:
    """Flip the signs of `num_values` float32 values in the middle of each stored tensor of at least
    `min_bytes` bytes. Returns the number of changed tensors.
    """
    num_tensors = 0
    for path in sorted(checkpoint.glob("__*.distcp")):
        data = bytearray(path.read_bytes())
        marks = [found.start() for found in ZIP_HEADER.finditer(data)]
        for begin, end in pairwise(marks):
            if end - begin > min_bytes:
                middle = (begin + (end - begin) // 2) // 64 * 64
                exponent = max(range(4), key=lambda shift: sum(0x30 <= data[middle + shift + 4 * n] & 0x7F <= 0x40 for n in range(256)))
                for number in range(num_values):
                    data[middle + exponent + 4 * number] ^= 0x80
                num_tensors += 1
        path.write_bytes(data)
    return num_tensors
