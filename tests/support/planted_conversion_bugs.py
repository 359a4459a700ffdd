"""Converts a model with --verify, once unmodified and once with each planted bug. Run by
test_converted.py.

    planted_conversion_bugs.py MODEL OUT

Every bug is symmetric: it cancels in a round trip, so only the comparison of logits can reveal it.
For each bug, the script writes OUT/NAME.json with the exit code, the output, and whether a round
trip preserves the tensors.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

from megatron_rl.models import decoder
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.model_spec import VisionSpec
from megatron_rl.models.name_mapping import AttentionHeads, Tensors, fuse_qkv, split_qkv
from megatron_rl.policy import transformer
from megatron_rl.policy.parallel import Layout
from megatron_rl.policy.vision import encode_images
from megatron_rl.weights.formats.safetensors_folder import HfTensors
from megatron_rl_tools.convert.converter_hf_to_mcore import main


def swap_heads(q: torch.Tensor, heads: AttentionHeads) -> torch.Tensor:
    """Swap the first two query heads."""
    first, second, rest = q.split([heads.head_dim, heads.head_dim, q.shape[0] - 2 * heads.head_dim])
    return torch.cat([second, first, rest])


def swap_images(
    tower: nn.Module, patch_PC: torch.Tensor, grid_I3: torch.Tensor, layout: Layout, *, sizes: VisionSpec
) -> tuple[torch.Tensor, int]:
    embeddings_VH, encoded = encode_images(tower, patch_PC, grid_I3, layout, sizes=sizes)
    return torch.cat(embeddings_VH.split((grid_I3.prod(1) // sizes.patches_per_token).tolist())[::-1]), encoded


PLANTED_BUGS: dict[str, list[tuple[object, str, Callable]]] = {
    "nothing": [],
    "gate and up": [
        (decoder, "fuse_halves", lambda tensors: torch.cat(tensors[::-1], 0)),
        (decoder, "split_halves", lambda fused: fused.chunk(2, 0)[::-1]),
    ],
    "q and k": [
        (decoder, "fuse_qkv", lambda tensors, heads, **options: fuse_qkv((tensors[1], tensors[0], tensors[2]), heads, **options)),
        (decoder, "split_qkv", lambda fused, heads, **options: _swap_q_and_k(split_qkv(fused, heads, **options))),
    ],
    "two heads": [
        (decoder, "fuse_qkv", lambda tensors, heads, **options: fuse_qkv((swap_heads(tensors[0], heads), *tensors[1:]), heads, **options)),
        (decoder, "split_qkv", lambda fused, heads, **options: _swap_heads_back(split_qkv(fused, heads, **options), heads)),
    ],
    "two images": [(transformer, "encode_images", swap_images)],
}


def _swap_q_and_k(tensors: Tensors) -> Tensors:
    return (tensors[1], tensors[0], *tensors[2:])


def _swap_heads_back(tensors: Tensors, heads: AttentionHeads) -> Tensors:
    return (swap_heads(tensors[0], heads), *tensors[1:])


@contextmanager
def apply_bugs(patches: list[tuple[object, str, Callable]]) -> Iterator[None]:
    if not patches:
        yield
        return
    owner, name, mistake = patches[0]
    with patch.object(owner, name, mistake), apply_bugs(patches[1:]):
        yield


def round_trips(model: Path) -> bool:
    source = HfTensors(model)
    for row in read_spec(model).param_mappings():
        tensors = tuple(source.read(name) for name in row.hf_names)
        if not all(torch.equal(a, b) for a, b in zip(row.to_hf([row.to_mcore(tensors, 0, 1)]), tensors, strict=True)):
            return False
    return True


def run_conversions(model: Path, out: Path) -> None:
    for name, changes in PLANTED_BUGS.items():
        said = StringIO()
        with apply_bugs(changes), redirect_stdout(said), redirect_stderr(said):
            code = main(["--hf", str(model), "--out", str(out / name), "--verify"])
            survives = round_trips(model)
        result = {"code": code, "said": said.getvalue(), "survives": survives, "left": sorted(path.name for path in out.glob("*[!n]"))}
        (out / f"{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    run_conversions(Path(sys.argv[1]), Path(sys.argv[2]))
