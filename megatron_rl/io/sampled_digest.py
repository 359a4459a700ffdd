"""Digests of large files from a sample of their blocks."""

import hashlib
from pathlib import Path

BLOCKS, BLOCK_BYTES = 4096, 4096
"""Limit of the bytes read of a file, 16 MiB: of a file of 4 GB one block in each MB, so that no layer of a model is left out."""


def compute_sampled_digest(path: Path) -> str:
    """Return the SHA-256 of a file's size and of blocks that are evenly spread over it; of a small file, of all of it."""
    size = path.stat().st_size
    total = hashlib.sha256(f"{size}\n".encode())
    with path.open("rb", buffering=0) as file:
        for start in range(0, size, max(BLOCK_BYTES, size // BLOCKS)):
            file.seek(start)
            total.update(file.read(BLOCK_BYTES))
    return total.hexdigest()
