"""A digest that tells the base models of adapters apart, the same in every format that holds the same weights.

It is the SHA-256 of the names and shapes of all tensors, and of numbers of the last decoder layer, the last block of the vision tower and
its merger: of each of these tensors 4,096 at most, evenly spread, rounded to bfloat16. So a checkpoint of Megatron's and one stored in
float32 have the digest of the Hugging Face folder they were made of, and half a gigabyte of a 7B model is read.
"""

import hashlib
import re
from collections.abc import Iterable

import torch

from megatron_rl.weights.formats.checkpoint_source import TensorSource

DIGEST = "base_model_digest"
"""Its name in adapter_config.json. PEFT 0.21 warns that it ignores it."""
SAMPLES = 4096


def compute_base_digest(source: TensorSource) -> str:
    """Return the digest of a model's tensors."""
    total = hashlib.sha256()
    for name in sorted(source.specs):
        total.update(f"{name} {list(source.specs[name].shape)}\n".encode())
    for name in _sampled(source.specs):
        numbers = source.read(name).flatten()
        numbers = numbers[:: max(1, numbers.numel() // SAMPLES)][:SAMPLES].to(torch.bfloat16)
        total.update(numbers.contiguous().view(torch.uint8).numpy().tobytes())
    return f"sha256:{total.hexdigest()}"


def _sampled(names: Iterable[str]) -> list[str]:
    """Return the names of the last decoder layer, the last vision block and the merger, sorted."""
    found = sorted(names)
    last = {
        part: max((int(number) for name in found for number in re.findall(pattern, name)), default=0)
        for part, pattern in (("model.layers", r"^model\.layers\.(\d+)\."), ("visual.blocks", r"^visual\.blocks\.(\d+)\."))
    }
    starts = (*(f"{part}.{number}." for part, number in last.items()), "visual.merger.")
    return [name for name in found if name.startswith(starts)]


def check_base(config: dict[str, object], source: TensorSource, *, key: str, adapter: object) -> str:
    """Raise ValueError where an adapter was trained on another base than `source`.

    Returns a warning where its adapter_config.json has no digest to compare, as those of other tools; else ''.
    """
    stated, base = config.get(DIGEST), config.get("base_model_name_or_path")
    if stated is None:
        return f"{key}={adapter}: its adapter_config.json has no {DIGEST}: that {base} is the base it is used with cannot be checked"
    if stated != compute_base_digest(source):
        raise ValueError(f"{key}={adapter}: was trained on another base ({base}) than this one; give the adapter's own base")
    return ""
