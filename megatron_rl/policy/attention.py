"""Attention over packed sequences, for Megatron's language model and Hugging Face's vision tower alike.

On a CPU, and in fp32 anywhere: scaled_dot_product_attention, one call for all segments of equal shape; a prompt shared by several
sequences is one segment. In bfloat16 on a GPU without Transformer Engine: torch's variable-length kernel (torch 2.13,
torch.nn.attention.varlen; it has no fp32), which was never run where this was written.

Shapes: T packed tokens, N query heads, K key/value heads, D head dimension.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface


@dataclass
class SharedPromptParams(PackedSeqParams):
    """Megatron's packed offsets, and for each segment the one it continues (Batch.prefix_S); travels through the layers untouched."""

    prefix_S: list[int] = field(default_factory=list)


def packed_attention(
    q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cu_seqlens_S1: torch.Tensor, *,
    causal: bool, scale: float, prefix_S: list[int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Each packed segment attends to itself and to the segment it continues, if any. Returns [T, N, D]."""
    if q_TND.is_cuda and q_TND.dtype != torch.float32:
        assert prefix_S is None or max(prefix_S) < 0, "the variable-length kernel takes whole sequences"
        return _varlen_kernel(q_TND, k_TKD, v_TKD, cu_seqlens_S1, causal=causal, scale=scale)
    grouped = q_TND.shape[1] != k_TKD.shape[1]
    rows, outputs = [], []
    for row_SL, key_row_SM in _equal_shapes(cu_seqlens_S1.tolist(), prefix_S, q_TND.device):
        q_SNLD, k_SKMD, v_SKMD = (x[r].transpose(1, 2) for x, r in ((q_TND, row_SL), (k_TKD, key_row_SM), (v_TKD, key_row_SM)))
        before = key_row_SM.shape[1] - row_SL.shape[1]
        mask_LM = row_SL.new_ones(row_SL.shape[1], key_row_SM.shape[1], dtype=torch.bool).tril(before) if before else None
        out_SNLD = scaled_dot_product_attention(
            q_SNLD, k_SKMD, v_SKMD, attn_mask=mask_LM, is_causal=causal and before == 0, scale=scale, enable_gqa=grouped
        )
        rows.append(row_SL.flatten())
        outputs.append(out_SNLD.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[torch.argsort(torch.cat(rows))]


def _equal_shapes(offsets: list[int], prefix_S: list[int] | None, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Segments of equal length behind prefixes of equal length, together: their query rows [S, L] and key rows [S, prefix + L]."""
    shapes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for segment, (start, stop) in enumerate(pairwise(offsets)):
        prefix = -1 if prefix_S is None else prefix_S[segment]
        before = offsets[prefix + 1] - offsets[prefix] if prefix >= 0 else 0
        if stop > start:
            shapes.setdefault((stop - start, before), []).append((start, offsets[prefix] if prefix >= 0 else 0))
    for (length, before), starts in shapes.items():
        own_SL = torch.tensor([start for start, _ in starts], device=device)[:, None] + torch.arange(length, device=device)
        prefix_SM = torch.tensor([start for _, start in starts], device=device)[:, None] + torch.arange(before, device=device)
        yield own_SL, torch.cat([prefix_SM, own_SL], 1)


def _varlen_kernel(
    q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cu_seqlens_S1: torch.Tensor, *, causal: bool, scale: float
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    longest = int((cu_seqlens_S1[1:] - cu_seqlens_S1[:-1]).max())
    return varlen_attn(
        q_TND, k_TKD, v_TKD, cu_seqlens_S1, cu_seqlens_S1, longest, longest,
        scale=scale, window_size=(-1, 0) if causal else (-1, -1), enable_gqa=q_TND.shape[1] != k_TKD.shape[1],
    )  # fmt: skip


class PackedCoreAttention(MegatronModule):
    """Megatron's `core_attention` for thd inputs; the interface is that of DotProductAttention in megatron-core 0.16.1."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType, attention_type: str, **_: object
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        self.scale = config.kv_channels**-0.5

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        attn_mask_type: AttnMaskType,
        attention_bias: None,
        packed_seq_params: SharedPromptParams,
    ) -> torch.Tensor:
        offsets, prefix_S = packed_seq_params.cu_seqlens_q, packed_seq_params.prefix_S
        return packed_attention(query, key, value, offsets, causal=True, scale=self.scale, prefix_S=prefix_S)


VISION_ATTENTION = "packed_flash_style"
"""Registered with transformers. "flash" in the name makes its vision tower call once with offsets instead of once a window (5.19)."""


def attend_patches(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None, *,
    scaling: float, cu_seq_lens_q: torch.Tensor, **_: object,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """The vision tower's attention: inputs [1, N, P, D], output [1, P, N, D]; images, or windows, do not see each other."""
    q_PND, k_PND, v_PND = (x[0].transpose(0, 1) for x in (query, key, value))
    return packed_attention(q_PND, k_PND, v_PND, cu_seq_lens_q, causal=False, scale=scaling)[None], None


AttentionInterface.register(VISION_ATTENTION, attend_patches)
