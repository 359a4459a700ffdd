"""Digests of large files from a sample of their blocks."""

import hashlib
from pathlib import Path

BLOCKS, BLOCK_BYTES = 4096, 4096
"""Number and size of the blocks that are read of a file, at most 16 MiB. A file of 4 GB has one
block in each MB, so that no layer of a model is left out.
"""


def compute_sampled_digest(path: Path) -> str:
    """Return the SHA-256 of a file's size and of blocks spread evenly over it.

    The blocks of a small file are the whole file.
    """
    size = path.stat().st_size
    total = hashlib.sha256(f"{size}\n".encode())
    with path.open("rb", buffering=0) as file:
        for start in range(0, size, max(BLOCK_BYTES, size // BLOCKS)):
            file.seek(start)
            total.update(file.read(BLOCK_BYTES))
    return total.hexdigest()
