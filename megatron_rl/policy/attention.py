"""Attention over packed sequences, for Megatron's language model and Hugging Face's vision tower alike.

On a CPU: scaled_dot_product_attention, one call for all sequences of equal length. On a GPU without Transformer Engine: torch's
variable-length kernel (torch 2.13, torch.nn.attention.varlen), which was never run where this was written.

Shapes: T packed tokens, N query heads, K key/value heads, D head dimension.
"""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface


def packed_attention(
    q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cu_seqlens_S1: torch.Tensor, *, causal: bool, scale: float
) -> torch.Tensor:
    """Each packed sequence attends to itself only. Returns [T, N, D]."""
    if q_TND.is_cuda:
        return _varlen_kernel(q_TND, k_TKD, v_TKD, cu_seqlens_S1, causal=causal, scale=scale)
    starts = cu_seqlens_S1.tolist()
    by_length: dict[int, list[int]] = {}
    for start, stop in zip(starts[:-1], starts[1:], strict=True):
        if stop > start:
            by_length.setdefault(stop - start, []).append(start)
    grouped = q_TND.shape[1] != k_TKD.shape[1]
    if len(by_length) == 1:
        (length,) = by_length
        return _equal_lengths(q_TND, k_TKD, v_TKD, length, causal=causal, scale=scale, grouped=grouped)
    rows, outputs = [], []
    for length, offsets in by_length.items():
        rows.append((torch.tensor(offsets)[:, None] + torch.arange(length)).flatten())
        q, k, v = (x_TXD[rows[-1]] for x_TXD in (q_TND, k_TKD, v_TKD))
        outputs.append(_equal_lengths(q, k, v, length, causal=causal, scale=scale, grouped=grouped))
    return torch.cat(outputs)[torch.argsort(torch.cat(rows))]


def _equal_lengths(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int, *, causal: bool, scale: float, grouped: bool
) -> torch.Tensor:
    q, k, v = (x.reshape(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(0, 1)


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
        packed_seq_params: PackedSeqParams,
    ) -> torch.Tensor:
        return packed_attention(query, key, value, packed_seq_params.cu_seqlens_q, causal=True, scale=self.scale)


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
