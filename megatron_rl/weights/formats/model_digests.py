"""Digests of the model that a run started with, recorded in the run's checkpoints.

A resumed run must use the same model. The policy is restored from its checkpoint. The reference
model of a KL term, the base model of an adapter, the tokenizer and the chat template are read from
model.path again.
"""

from collections.abc import Mapping
from pathlib import Path

from megatron_rl.io.sampled_digest import compute_sampled_digest
from megatron_rl.weights.formats.digests import compute_sha256

FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json",
    "chat_template.jinja", "chat_template.json", "processor_config.json", "preprocessor_config.json",
)  # fmt: skip
"""Names of the files, other than weight files, that affect the model's inputs or computation."""
WEIGHTS = (".safetensors", ".distcp", ".pt")
"""Suffixes of weight files."""
MISSING_FILE = "none: the file does not exist"


def model_digests(folder: Path) -> dict[str, str]:
    """Return a digest for each relevant file in a model folder, keyed by relative path.

    The digest of a file named in FILES is the file's SHA-256. The digest of a weight file is a
    sampled digest (io/sampled_digest.py).
    """
    stored = {name: compute_sha256(folder / name) for name in FILES if (folder / name).is_file()}
    weights = sorted(path for path in folder.rglob("*") if path.suffix in WEIGHTS and path.is_file())
    return stored | {str(path.relative_to(folder)): compute_sampled_digest(path) for path in weights}


def check_same_model(recorded: Mapping[str, str], found: Mapping[str, str], *, key: str, folder: object) -> None:
    """Raise ValueError if the digests of a model differ from the recorded digests.

    The message contains the name of the first file that differs, and both digests of this file.
    """
    for name in dict.fromkeys((*found, *recorded)):
        before, now = recorded.get(name, MISSING_FILE), found.get(name, MISSING_FILE)
        if before != now:
            raise ValueError(
                f"{key}={folder}: contains a different model than at the start of the run: the digest of {name} is {now}, and was {before}"
                "; restore the original model, or choose another run.dir"
            )
