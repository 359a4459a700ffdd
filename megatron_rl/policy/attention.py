"""Attention over packed sequences, for Megatron's language model and Hugging Face's vision tower alike.

What several contexts begin with is one segment, which each of them continues: a tree. On a CPU, and in fp32 anywhere:
scaled_dot_product_attention, one call for all segments of equal shape. In bfloat16 on a GPU without Transformer Engine: torch's
variable-length kernel (torch 2.13, torch.nn.attention.varlen; it has no fp32), which was never run where this was written; tests hold its
place with one of the same contract.

Shapes: T packed tokens, N query heads, K key/value heads, D head dimension. Gathered keys and values are [K, M, D]: K rows of M heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from megatron_rl.errors import RunFailed
from megatron_rl.policy.deepstack import DeepStack

PREFIX_ATTENTION_BOUND = 2e-2
"""Relative, of bfloat16's rounding; a mask that is aligned otherwise is off by more than half."""


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device, without a wait for it: a copy from pinned memory takes its turn there, any other one stops the host."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class Segments:
    """How packed tokens are cut, and what follows from it for attention: made once a micro-batch, used by every layer. No layer asks the
    device for it: the offsets are the host's."""

    def __init__(self, offset_S1: Sequence[int], prefix_S: Sequence[int] | None = None, *, device: torch.device) -> None:
        """prefix_S: for each segment the one that it continues, or -1 (Batch.prefix_S); None: none continues another."""
        self.offset_S1, self.device = list(offset_S1), device
        self.prefix_S = [-1] * (len(self.offset_S1) - 1) if prefix_S is None else prefix_S

    @cached_property
    def key_rows(self) -> list[torch.Tensor]:
        """What each segment attends to, on the host: the rows of all that it continues, from the first on, and its own."""
        rows: list[torch.Tensor] = []
        for (start, stop), prefix in zip(pairwise(self.offset_S1), self.prefix_S, strict=True):
            own = torch.arange(start, stop)
            rows.append(own if prefix < 0 else torch.cat([rows[prefix], own]))
        return rows

    @cached_property
    def group_by_length(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Segments of equal length behind as many keys, together: their query rows [S, L] and key rows [S, before + L]."""
        shapes: dict[tuple[int, int], list[torch.Tensor]] = {}
        for (start, stop), rows in zip(pairwise(self.offset_S1), self.key_rows, strict=True):
            if stop > start:
                shapes.setdefault((stop - start, len(rows)), []).append(rows)
        stacked = [(length, torch.stack(rows)) for (length, _), rows in shapes.items()]
        return [(to_device(key_row_SM[:, -length:], self.device), to_device(key_row_SM, self.device)) for length, key_row_SM in stacked]

    @cached_property
    def max_length(self) -> int:
        """Tokens of the longest one."""
        return max(stop - start for start, stop in pairwise(self.offset_S1))

    @cached_property
    def varlen_inputs(self) -> "VarlenInputs":
        lengths = [0, *map(len, self.key_rows)]
        is_shared = max(self.prefix_S, default=-1) >= 0
        return VarlenInputs(
            cu_query_S1=to_device(torch.tensor(self.offset_S1, dtype=torch.int32), self.device),
            cu_key_S1=to_device(torch.tensor(list(accumulate(lengths)), dtype=torch.int32), self.device),
            row_K=to_device(torch.cat(self.key_rows), self.device) if is_shared else None,
            max_query_length=self.max_length, max_key_length=max(lengths),
        )  # fmt: skip


@dataclass(slots=True, frozen=True, kw_only=True)
class VarlenInputs:
    """Segments as a variable-length kernel takes them: keys and values of each in one run, behind those of all that it continues."""

    cu_query_S1: torch.Tensor
    cu_key_S1: torch.Tensor
    row_K: torch.Tensor | None
    """Whose key each is; None where every segment has its own alone."""
    max_query_length: int
    max_key_length: int


VarlenKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, VarlenInputs, bool, float], torch.Tensor]
"""(q [T, N, D], k [K, M, D], v, segments, causal, scale) -> [T, N, D]. Causal means that the last query of a segment sees its last key."""


@dataclass
class SharedPromptParams(PackedSeqParams):
    """What travels through Megatron's layers to our attention, untouched; and the packed offsets of Transformer Engine's."""

    segments: Segments | None = None
    stacked: DeepStack | None = None


def packed_attention(
    q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, segments: Segments, *, causal: bool, scale: float
) -> torch.Tensor:
    """Each packed segment attends to itself and to all that it continues. Returns [T, N, D]."""
    if has_varlen_kernel(q_TND.device, q_TND.dtype):
        return run_varlen_kernel(varlen_attention, q_TND, k_TKD, v_TKD, segments.varlen_inputs, causal=causal, scale=scale)
    grouped = q_TND.shape[1] != k_TKD.shape[1]
    rows, outputs = [], []
    for row_SL, key_row_SM in segments.group_by_length:
        q_SNLD, k_SKMD, v_SKMD = (x[r].transpose(1, 2) for x, r in ((q_TND, row_SL), (k_TKD, key_row_SM), (v_TKD, key_row_SM)))
        before = key_row_SM.shape[1] - row_SL.shape[1]
        mask_LM = row_SL.new_ones(row_SL.shape[1], key_row_SM.shape[1], dtype=torch.bool).tril(before) if before else None
        out_SNLD = scaled_dot_product_attention(
            q_SNLD, k_SKMD, v_SKMD, attn_mask=mask_LM, is_causal=causal and before == 0, scale=scale, enable_gqa=grouped
        )
        rows.append(row_SL.flatten())
        outputs.append(out_SNLD.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[torch.argsort(torch.cat(rows))]


def run_varlen_kernel(
    kernel: VarlenKernel,
    q_TND: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    gathered: VarlenInputs,
    *,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """What several segments continue is computed once; its keys and values are handed to the kernel with each of them, and their gradients
    add up through the rows."""
    if gathered.row_K is not None:
        k_TKD, v_TKD = k_TKD[gathered.row_K], v_TKD[gathered.row_K]
    return kernel(q_TND, k_TKD, v_TKD, gathered, causal, scale)


def has_varlen_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype != torch.float32


def varlen_attention(
    q_TND: torch.Tensor, k_KMD: torch.Tensor, v_KMD: torch.Tensor, gathered: VarlenInputs, causal: bool, scale: float
) -> torch.Tensor:
    """torch's kernel. Flash attention aligns a causal mask to the last key, which `require_continuation` looks at on the device."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(
        q_TND, k_KMD, v_KMD, gathered.cu_query_S1, gathered.cu_key_S1, gathered.max_query_length, gathered.max_key_length,
        scale=scale, window_size=(-1, 0) if causal else (-1, -1), enable_gqa=q_TND.shape[1] != k_KMD.shape[1],
    )  # fmt: skip


def require_prefix_attention(kernel: VarlenKernel, device: torch.device, dtype: torch.dtype) -> None:
    """RunFailed: the kernel does not let the queries of a segment see what it continues, and themselves, and nothing else."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(7, heads, 64, generator=generator).to(dtype) for heads in (4, 2, 2))
    offsets, prefix_S, scale = [0, 3, 5, 7], [-1, 0, 0], 64**-0.5
    truth = packed_attention(q.float(), k.float(), v.float(), Segments(offsets, prefix_S, device=q.device), causal=True, scale=scale)
    gathered = Segments(offsets, prefix_S, device=device).varlen_inputs
    out = run_varlen_kernel(kernel, q.to(device), k.to(device), v.to(device), gathered, causal=True, scale=scale)
    if not (out.float().cpu() - truth).norm() <= PREFIX_ATTENTION_BOUND * truth.norm():
        raise RunFailed(
            f"torch={torch.__version__}: its variable-length attention is not aligned to the last key; install requirements/gpu.txt"
        )


class PackedCoreAttention(MegatronModule):
    """Megatron's `core_attention`; the interface is that of DotProductAttention in megatron-core 0.16.1. To Megatron the packed tokens are
    one sequence of the format sbhd [T, 1, N, D], where its rotary embedding maps position by position: as thd it would ask the device for
    the lengths three times for queries and for keys (models/common/embeddings/rope_utils.py, _apply_rotary_pos_emb_thd)."""

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
        q_TND, k_TKD, v_TKD = (x.squeeze(1) for x in (query, key, value))
        out_TND = packed_attention(q_TND, k_TKD, v_TKD, packed_seq_params.segments, causal=True, scale=self.scale)
        return out_TND.flatten(1)[:, None]


VISION_ATTENTION = "packed_flash_style"
"""Registered with transformers. "flash" in the name makes its vision tower call once with offsets instead of once a window (5.19)."""


def attend_patches(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None, *,
    scaling: float, cu_seq_lens_q: Segments, **_: object,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """The vision tower's attention: inputs [1, N, P, D], output [1, P, N, D]; images, or windows, do not see each other. What stands in
    the offsets' place is handed in with the patches (vision.py), and the tower passes it on as it is."""
    q_PND, k_PND, v_PND = (x[0].transpose(0, 1) for x in (query, key, value))
    return packed_attention(q_PND, k_PND, v_PND, cu_seq_lens_q, causal=False, scale=scaling)[None], None


AttentionInterface.register(VISION_ATTENTION, attend_patches)
