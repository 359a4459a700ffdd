"""Computes the version of a served model, which clients use as part of their cache keys."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # slow to import
    import torch


def compute_folder_version(folder: Path, *words: object) -> str:
    """Return a hash of everything that a model's answers depend on.

    The hash covers the files in `folder` and the settings in `words`, such as image size limits and
    dtype.
    """
    digest = hashlib.sha256(repr(words).encode())
    for path in sorted(folder.iterdir()):
        if path.is_file():
            with path.open("rb") as file:
                digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:32]


def compute_tensors_version(tensors: "Mapping[str, torch.Tensor]", *words: object) -> str:
    """Return a hash of tensors and settings, for weights that are not stored in files."""
    import torch

    digest = hashlib.sha256(repr(words).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]
