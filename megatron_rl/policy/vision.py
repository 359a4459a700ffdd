"""Hugging Face's vision tower, replicated on all tensor-parallel ranks of the first pipeline stage.

Each tensor-parallel rank encodes its share of a micro-batch's distinct images, and the embeddings
are gathered. Each rank therefore computes a partial gradient of the vision tower. Megatron reduces
the partial gradients (finalize_model_grads).
"""

from collections.abc import Sequence
from math import isqrt, prod
from typing import Any, cast

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import nn
from transformers import PreTrainedModel
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from megatron_rl.config import LoraSettings
from megatron_rl.models.model_spec import ModelSpec, VisionSpec
from megatron_rl.policy.attention import Segments, packed_attention, to_device
from megatron_rl.policy.fused import fused_rms_norm, gated_mlp, rotate
from megatron_rl.policy.lora import LoraLinear, adapt_vision
from megatron_rl.policy.parallel import Layout

Grid = Sequence[int]
"""Size of an image in patches: the number of frames, rows and columns."""


class LinearPatchEmbed(nn.Conv3d):
    """Patch embedding as one matrix product instead of a convolution.

    The matrix product equals the convolution, because the convolution's kernel is as large as a
    patch. cuDNN has no efficient engine for this convolution in bfloat16. For this reason, vLLM
    uses a matrix product with torch 2.9 and later (vLLM 0.32.0, model_executor/layers/conv.py).
    """

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Return the patch embeddings, shaped like the output of the convolution."""
        return nn.functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)[..., None, None, None]


class FusedRMSNorm(nn.Module):
    """Fused replacement for the forward pass of the vision tower's norm.

    `build_vision_tower` changes the class of the tower's norm modules from
    ModelFamily.tower_norm_class to this class. The modules keep their weights.
    """

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the normalized hidden states."""
        return fused_rms_norm(hidden_states, self.weight, self.variance_epsilon)


class GatedMLP(nn.Module):
    """Replacement for the forward pass of the vision tower's gated MLP; see fused.gated_mlp.

    `build_vision_tower` changes the class of the tower's MLPs without adapters to this class. The
    modules keep their weights.
    """

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, hidden_state: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output [P, H]."""
        return gated_mlp(hidden_state, self.gate_proj, self.up_proj, self.down_proj)


class PackedVisionAttention(nn.Module):
    """Replacement for the forward pass of the vision tower's attention, for packed patches.

    The three model families have the same attention. `build_vision_tower` changes the class of the
    tower's attention modules to this class. The modules keep their weights.
    """

    qkv: nn.Linear
    proj: nn.Linear
    num_heads: int
    scaling: float

    def forward(
        self, hidden_states: torch.Tensor, cu_seqlens: Segments, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: object
    ) -> torch.Tensor:
        """Return the output [P, H] of attention within each image or window.

        `encode_patches` passes a `Segments` object instead of offsets as `cu_seqlens`. The tower
        forwards the object unchanged.
        """
        q_PND, k_PND, v_PND = self.qkv(hidden_states).unflatten(1, (3, self.num_heads, -1)).unbind(1)
        q_PND, k_PND = rotate(q_PND, k_PND, *position_embeddings)
        return self.proj(packed_attention(q_PND, k_PND, v_PND, cu_seqlens, causal=False, scale=self.scaling).flatten(1))


def build_vision_tower(spec: ModelSpec, layout: Layout, dtype: torch.dtype, *, lora: LoraSettings) -> PreTrainedModel:
    """Build the vision tower and replace its attention, patch embedding, norms and gated MLPs.

    Adapters are added if lora.rank is not 0. Recomputation is enabled if the layout requires it.
    """
    tower = cast("Any", spec.build_tower()).to(dtype)
    tower.patch_embed.proj.__class__ = LinearPatchEmbed
    for block in tower.blocks:
        block.attn.__class__ = PackedVisionAttention
    for module in tower.modules():
        if spec.family.tower_norm_class and isinstance(module, spec.family.tower_norm_class):
            module.__class__ = FusedRMSNorm
    if layout.recompute in ("vision", "full"):
        tower.gradient_checkpointing_enable({"use_reentrant": False})
    if lora.rank:
        adapt_vision(tower, lora, spec.family.vision_lora_patterns)
    for block in tower.blocks:
        is_gated = spec.family.tower_mlp_class and isinstance(block.mlp, spec.family.tower_mlp_class) and tower.config.hidden_act == "silu"
        if is_gated and not any(isinstance(part, LoraLinear) for part in block.mlp.children()):
            block.mlp.__class__ = GatedMLP
    for parameter in tower.parameters():
        # Megatron averages these gradients over tensor-parallel ranks after the backward pass.
        # encode_images multiplies them by tp, so that the average equals the sum of the unscaled
        # gradients.
        parameter.average_gradients_across_tp_domain = True
    return tower


def balance_over_ranks(patches_I: list[int], ranks: int) -> list[list[int]]:
    """Assign images to ranks, largest first, each to the rank with the fewest patches so far.

    Example: balance_over_ranks([4, 16, 8, 4], 2) == [[1], [2, 0, 3]].
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for image in sorted(range(len(patches_I)), key=lambda image: -patches_I[image]):
        rank = loads.index(min(loads))
        shares[rank].append(image)
        loads[rank] += patches_I[image]
    return shares


def encode_images(
    tower: nn.Module, patch_PC: torch.Tensor, grid_I3: torch.Tensor, layout: Layout, *, sizes: VisionSpec
) -> tuple[torch.Tensor, int]:
    """Return the embeddings [V, H] of all images, and the number of images that this rank encoded.

    `patch_PC` holds only the patches of this rank's share; `grid_I3` holds the grids of all images.
    With DeepStack the embeddings are [V, (1 + num_deepstack_layers) * H]. The grids are on the
    host, so that this function does not wait for the device.
    """
    grids = grid_I3.tolist()
    if layout.tp == 1:
        return encode_patches(tower, patch_PC, grids, sizes), len(grids)
    patches_I = list(map(prod, grids))
    shares = balance_over_ranks(patches_I, layout.tp)
    mine = shares[layout.tp_rank]
    if mine:
        local = encode_patches(tower, patch_PC, [grids[image] for image in mine], sizes)
    else:
        local = patch_PC.new_zeros(0, sizes.out_hidden_size * (1 + sizes.num_deepstack_layers))
    # Megatron's average over tensor-parallel ranks divides gradients by tp, but the gradient of
    # each image exists on one rank only.
    local = _ScaleGradient.apply(local, layout.tp)
    longest = max(sum(patches_I[image] for image in share) // sizes.patches_per_token for share in shares)
    padded = torch.cat([local, local.new_zeros(longest - local.shape[0], local.shape[1])])
    gathered = gather_from_sequence_parallel_region(padded, tensor_parallel_output_grad=False)
    places = {}
    for rank, share in enumerate(shares):
        offset = rank * longest
        for image in share:
            places[image] = range(offset, offset + patches_I[image] // sizes.patches_per_token)
            offset = places[image].stop
    rows_V = torch.tensor([row for image in sorted(places) for row in places[image]])
    return gathered[to_device(rows_V, gathered.device)], len(mine)


def encode_patches(tower: nn.Module, patch_PC: torch.Tensor, grids: Sequence[Grid], sizes: VisionSpec) -> torch.Tensor:
    """Return the vision tower's embeddings [V, H] of patches.

    All inputs that depend on the grids are computed here and passed to the tower. Otherwise, the
    tower would compute these inputs, with about ten device synchronizations plus one for each
    block. Offsets are passed as `Segments`, which the tower forwards unchanged to its attention.
    """
    device, known = patch_PC.device, compute_grid_inputs(grids, sizes)
    given: dict[str, object] = {}
    for offsets in ("cu_seqlens", "cu_window_seqlens"):
        if offsets in known:
            given[offsets] = Segments(known.pop(offsets).tolist(), device=device)
    given |= {name: to_device(tensor, device) for name, tensor in known.items()}
    encoded = tower(patch_PC, grid_thw=None, **given)
    return torch.cat([encoded.pooler_output, *encoded.deepstack_features], 1) if sizes.num_deepstack_layers else encoded.pooler_output


def compute_grid_inputs(grids: Sequence[Grid], sizes: VisionSpec) -> dict[str, torch.Tensor]:
    """Compute the vision tower's inputs that depend only on the grids, keyed by argument name.

    The tower does not compute inputs that are passed to it (transformers 5.19, vision_utils.py).
    """
    grid_I3 = torch.tensor(grids)
    known = {"position_ids": get_vision_position_ids(grid_I3, sizes.spatial_merge_size), "cu_seqlens": get_vision_cu_seqlens(grid_I3)}
    if sizes.window_size:
        window_index, cu_window_seqlens = get_vision_window_index(grid_I3, sizes.spatial_merge_size, sizes.window_size, sizes.patch_size)
        known |= {"window_index": window_index, "cu_window_seqlens": cu_window_seqlens}
    if sizes.num_position_embeddings:
        side = isqrt(sizes.num_position_embeddings)
        taken = get_vision_interpolation_indices_and_weights(grid_I3, side, align_corners=True, spatial_merge_size=sizes.spatial_merge_size)
        known |= dict(zip(("interp_indices", "interp_weights"), taken, strict=True))
    return known


class _ScaleGradient(torch.autograd.Function):
    """Identity in the forward pass; multiplies the gradient by `factor` in the backward pass."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, factor: float) -> torch.Tensor:  # noqa: ANN001
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN001
        return gradient * ctx.factor, None
