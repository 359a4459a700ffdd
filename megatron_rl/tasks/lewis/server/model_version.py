"""Which model a server serves, in one word: who keeps its answers keeps them by that."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it is heavy
    import torch


def compute_folder_version(folder: Path, *words: object) -> str:
    """Of all that a model's answers depend on: its files, and how pictures and numbers are treated."""
    digest = hashlib.sha256(repr(words).encode())
    for path in sorted(folder.iterdir()):
        if path.is_file():
            with path.open("rb") as file:
                digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:32]


def compute_tensors_version(tensors: "Mapping[str, torch.Tensor]", *words: object) -> str:
    """Of all that answers depend on, as version_of says it of a folder."""
    import torch

    digest = hashlib.sha256(repr(words).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]
