"""Compares the logits of a Megatron checkpoint with the logits of its Hugging Face folder.

The comparison detects conversion errors that cancel out when a model is converted to Megatron
and back. Both models run in fp32 in this process, one after the other. The inputs are random token
ids and image patches from a fixed seed, so no tokenizer or processor is needed. The first prompt
contains only text, and the second prompt contains two images of different sizes.
"""

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from PIL import Image as Pillow
from torch import nn
from transformers import PreTrainedModel

from megatron_rl.batching.minibatches import PackItem
from megatron_rl.batching.packing import pack
from megatron_rl.compat.megatron_cpu import with_megatron_on_cpu
from megatron_rl.config import LoraSettings, ParallelSettings, require
from megatron_rl.distributed.world import connect, read_world
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.policy.parallel import build_layout
from megatron_rl.policy.patches import patch_bytes
from megatron_rl.policy.training_state import load_weights
from megatron_rl.policy.transformer import ModelChunk
from megatron_rl.types import Image, TokenSequence
from megatron_rl.weights.formats.expert_layouts import check_loads_in_transformers
from megatron_rl.weights.formats.safetensors_folder import HfTensors
from megatron_rl.weights.formats.torch_dist import McoreTensors
from megatron_rl.weights.stream import is_adapter

TOLERANCE = 1e-5
"""Maximum accepted absolute difference between logits, relative to the largest absolute logit.

If a conversion is correct, two fp32 forward passes differ by about 1e-6 of the largest logit.
"""


def make_test_prompts(spec: ModelSpec) -> dict[str, TokenSequence]:
    """Return a text prompt and a two-image prompt of random token ids and patches."""
    generator = torch.Generator().manual_seed(0)
    special = (spec.image_token_id, spec.video_token_id, spec.vision_start_id, spec.vision_end_id)
    plain = [token for token in range(spec.vocab_size) if token not in special]

    def text(length: int) -> list[int]:
        return [plain[index] for index in torch.randint(len(plain), (length,), generator=generator).tolist()]

    merge, images = spec.vision.spatial_merge_size, []
    for rows, columns in ((2 * merge, 3 * merge), (4 * merge, 2 * merge)):
        patch_PC = torch.randn(rows * columns, spec.vision.patch_dim, generator=generator)
        images.append(Image(Pillow.new("RGB", (1, 1)), patch_PC, (1, rows, columns), key=f"{rows} x {columns}", merge=merge))
    shown = TokenSequence(text(5))
    for image in images:
        placeholders = [spec.vision_start_id, *[spec.image_token_id] * image.num_tokens, spec.vision_end_id]
        shown.token_ids += placeholders + text(3)
        shown.images.append(image)
    read = TokenSequence(text(24))
    for context in (read, shown):
        context.loss_mask = [0] * len(context.token_ids)
        context.rollout_logprobs = [0.0] * len(context.token_ids)
    return {"text prompt": read, "two-image prompt": shown}


@torch.no_grad()
def compute_hf_logits(folder: Path, *, dtype: torch.dtype | None = None, key: str = "--hf") -> dict[str, torch.Tensor]:
    """Return the logits of the transformers model for each prompt: [L, vocabulary], in fp32.

    The weights are first rounded to `dtype`; if `dtype` is None, the weights are used as stored.
    """
    spec = read_spec(folder, key=key)
    check_loads_in_transformers(HfTensors(folder, key=key), key=key)
    _check_memory(spec, folder, key=key)
    model = spec.family.model_class.from_pretrained(folder, dtype=dtype or "auto", attn_implementation="sdpa").float().eval()
    return {name: compute_logits(model, context, image_token_id=spec.image_token_id) for name, context in make_test_prompts(spec).items()}


def compute_logits(model: PreTrainedModel, context: TokenSequence, *, image_token_id: int) -> torch.Tensor:
    """Return the logits [L, vocabulary] of one sequence, computed by a transformers model."""
    ids = torch.tensor([context.token_ids])
    images = {}
    if context.images:
        images = {
            "pixel_values": torch.cat([image.patch_PC for image in context.images]),
            "image_grid_thw": torch.tensor([image.grid for image in context.images]),
            "mm_token_type_ids": (ids == image_token_id).int(),
        }
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), **images).logits[0]


@with_megatron_on_cpu
@torch.no_grad()
def compute_mcore_logits(checkpoint: Path, *, key: str = "--checkpoint") -> dict[str, torch.Tensor]:
    """Return the logits of the Megatron model for each prompt: [L, vocabulary], in fp32.

    The checkpoint is loaded by Megatron's dist_checkpointing.load.
    """
    spec = read_spec(checkpoint / "hf", key=key)
    remedy = "contains a LoRA adapter; merge it, and compare the merged folder"
    require(not any(map(is_adapter, McoreTensors(checkpoint, key=key).specs)), key, checkpoint, remedy)
    _check_memory(spec, checkpoint, key=key)
    with _single_process_group():
        model = ModelChunk(spec, build_layout(ParallelSettings(), seed=0), torch.float32, lora=LoraSettings()).eval()
        load_weights(nn.ModuleList([model]), checkpoint, key=key)
        logits = {}
        for name, context in make_test_prompts(spec).items():
            batch = pack([PackItem(context)], image_token_id=spec.image_token_id, positions=spec.rope_positions)
            batch.patch_PC = torch.cat([patch_bytes(image) for image in batch.images]) if batch.images else None
            logits[name] = model.head(model(batch, torch.arange(batch.num_tokens)))
    return logits


@contextmanager
def _single_process_group() -> Iterator[None]:
    """Provide Megatron's process groups inside a `with` block."""
    connect(read_world(), timeout_s=60)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        gc.collect()


def _check_memory(spec: ModelSpec, folder: Path, *, key: str) -> None:
    """Raise ValueError if the fp32 model does not fit into the available memory.

    The estimate of 4.4 bytes per parameter includes the tensor that is being read.
    """
    needed = 4.4 * sum(math.prod(shape) for shape in spec.shapes().values()) / 2**30
    available = psutil.virtual_memory().available / 2**30
    remedy = f"comparing logits requires {needed:.1f} GiB of memory in fp32, but {available:.1f} GiB are free; use a larger machine"
    require(needed < available, key, folder, remedy)


def verify_logits(hf: Path, checkpoint: Path, *, dtype: torch.dtype | None = None) -> str:
    """Compare the logits of both models and return a one-line summary.

    Raises:
        ValueError: The logits differ by more than TOLERANCE, or a model does not fit into memory.
    """
    theirs, ours = compute_hf_logits(hf, dtype=dtype), compute_mcore_logits(checkpoint)
    gaps = {name: ((ours[name] - logits).abs().max() / logits.abs().max()).item() for name, logits in theirs.items()}
    account = ", ".join(f"{name} {gap:.1e}" for name, gap in gaps.items())
    require(
        all(gap <= TOLERANCE for gap in gaps.values()), "--verify", checkpoint,
        f"the logits differ from those of {hf} (largest difference / largest logit: {account}; the tolerance is {TOLERANCE:g})",
    )  # fmt: skip
    return f"verified: logits match Hugging Face's (largest difference / largest logit: {account})"
