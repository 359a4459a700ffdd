"""Digest that identifies an adapter's base model, independent of the checkpoint format.

The digest is the SHA-256 of the names and shapes of all tensors and of a sample of their values.
Values are sampled from the last decoder layer, the last block of the vision tower and the vision
tower's merger: at most 4,096 values per tensor, evenly spread and rounded to bfloat16. Therefore, a
Megatron or float32 checkpoint has the same digest as the Hugging Face folder that it was converted
from. For a 7B model, only half a gigabyte is read.
"""

import hashlib
import re
from collections.abc import Iterable

import torch

from megatron_rl.weights.formats.checkpoint_source import TensorSource

DIGEST = "base_model_digest"
"""Name of the digest's field in adapter_config.json; PEFT 0.21 ignores the field with a warning."""
SAMPLES = 4096


def compute_base_digest(source: TensorSource) -> str:
    """Return the digest of a model, in the form `sha256:...`."""
    total = hashlib.sha256()
    for name in sorted(source.specs):
        total.update(f"{name} {list(source.specs[name].shape)}\n".encode())
    for name in _sampled(source.specs):
        numbers = source.read(name).flatten()
        numbers = numbers[:: max(1, numbers.numel() // SAMPLES)][:SAMPLES].to(torch.bfloat16)
        total.update(numbers.contiguous().view(torch.uint8).numpy().tobytes())
    return f"sha256:{total.hexdigest()}"


def _sampled(names: Iterable[str]) -> list[str]:
    found = sorted(names)
    last = {
        part: max((int(number) for name in found for number in re.findall(pattern, name)), default=0)
        for part, pattern in (("model.layers", r"^model\.layers\.(\d+)\."), ("visual.blocks", r"^visual\.blocks\.(\d+)\."))
    }
    starts = (*(f"{part}.{number}." for part, number in last.items()), "visual.merger.")
    return [name for name in found if name.startswith(starts)]


def check_base(config: dict[str, object], source: TensorSource, *, key: str, adapter: object) -> str:
    """Raise ValueError if an adapter was trained on a different base model than `source`.

    `config` is the content of adapter_config.json. Returns a warning if the adapter was written by
    another tool and has no digest, else ''.
    """
    stated, base = config.get(DIGEST), config.get("base_model_name_or_path")
    if stated is None:
        return f"{key}={adapter}: its adapter_config.json has no {DIGEST}: cannot check that {base} is the base model in use"
    if stated != compute_base_digest(source):
        raise ValueError(f"{key}={adapter}: was trained on another base model ({base}); use the adapter's own base model")
    return ""
