"""Digests of the model that a run began with, recorded in its checkpoints: a run does not go on with another one.

The policy goes on from its checkpoint whatever lies in model.path, but the reference of a KL term, the base of an adapter, the
tokenizer and the chat template are read there again.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from megatron_rl.weights.formats.digests import digest

FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json",
    "chat_template.jinja", "chat_template.json", "processor_config.json", "preprocessor_config.json",
)  # fmt: skip
"""The files beside the weights that decide what a model reads and computes."""
WEIGHTS = (".safetensors", ".distcp", ".pt")
"""Endings of the files of weights."""
BLOCKS, BLOCK_BYTES = 4096, 4096
"""What is read of a file of weights at the most: 16 MiB, of one of 4 GB a block in each MB, so that no layer is left out."""
NONE = "none: the file is not there"


def model_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each of FILES that is there and `sampled_digest` of each file of weights, by its path in the folder."""
    stored = {name: digest(folder / name) for name in FILES if (folder / name).is_file()}
    weights = sorted(path for path in folder.rglob("*") if path.suffix in WEIGHTS and path.is_file())
    return stored | {str(path.relative_to(folder)): sampled_digest(path) for path in weights}


def sampled_digest(path: Path) -> str:
    """Return the SHA-256 of a file's size and of blocks that are evenly spread over it; of a small file, of all of it."""
    size = path.stat().st_size
    total = hashlib.sha256(f"{size}\n".encode())
    with path.open("rb", buffering=0) as file:
        for start in range(0, size, max(BLOCK_BYTES, size // BLOCKS)):
            file.seek(start)
            total.update(file.read(BLOCK_BYTES))
    return total.hexdigest()


def check_same_model(recorded: Mapping[str, str], found: Mapping[str, str], *, key: str, folder: object) -> None:
    """Raise ValueError where a model is not the recorded one, with the first file that differs and both digests."""
    for name in dict.fromkeys((*found, *recorded)):
        before, now = recorded.get(name, NONE), found.get(name, NONE)
        if before != now:
            raise ValueError(
                f"{key}={folder}: holds another model than when this run began: the digest of its {name} is {now}, and was {before}; "
                "put the first model back, or choose another run.dir"
            )
