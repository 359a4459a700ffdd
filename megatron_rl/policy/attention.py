"""Attention over packed sequences, for Megatron's language model and Hugging Face's vision tower.

If several sequences share a prefix, the prefix is stored once, as a separate segment. The rest of
each sequence is another segment, which continues the prefix segment. The segments of a micro-batch
form one or more trees.

On a CPU, and in fp32 on any device, attention calls scaled_dot_product_attention once per distinct
segment shape. In bfloat16 on a GPU without Transformer Engine, attention calls torch's
variable-length kernel (torch 2.13, torch.nn.attention.varlen), which does not support fp32. Tests
on CPUs replace the kernel with a function that has the same interface; tests/gpu and
benchmarks/gpu/varlen.py compare the kernel with float64 attention on a GPU.

In shapes, T is the number of packed tokens, N the number of query heads, K the number of key/value
heads, and D the head dimension. In the shape [K, M, D] of gathered keys and values, however, K is
the number of gathered rows and M the number of key/value heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, cast

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention

from megatron_rl.errors import RunFailed
from megatron_rl.policy.deepstack import DeepStack
from megatron_rl.policy.fused import rotate
from megatron_rl.policy.router_losses import BatchWeights
from megatron_rl.policy.routing_replay import BatchRouting

if TYPE_CHECKING:
    from megatron_rl.policy.delta_rule import DeltaPlan

PREFIX_ATTENTION_BOUND = 2e-2
"""Largest relative error accepted by `require_prefix_attention`. The bound allows for bfloat16
rounding; a mask with a different alignment causes an error above 0.5.
"""


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to the device without blocking the host.

    On CUDA the tensor is pinned first, because a copy from pageable memory would block.
    """
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class Segments:
    """Segment boundaries of a packed micro-batch, and the indices that attention needs.

    One instance is created for each micro-batch and used by every layer. The offsets are on the
    host, so no layer waits for the device.
    """

    def __init__(self, offset_S1: Sequence[int], prefix_S: Sequence[int] | None = None, *, device: torch.device) -> None:
        """Store offsets and prefixes; the indices are computed on first use.

        For each segment, `prefix_S` contains the index of the prefix segment, or -1 if there is no
        prefix (see MicroBatch.prefix_S). None means that no segment has a prefix.
        """
        self.offset_S1, self.device = list(offset_S1), device
        self.prefix_S = [-1] * (len(self.offset_S1) - 1) if prefix_S is None else prefix_S

    @cached_property
    def key_rows(self) -> list[torch.Tensor]:
        """Indices, on the host, of the packed rows that each segment attends to.

        For each segment, the rows of its prefix segments come first (root of the tree first),
        followed by the segment's own rows.
        """
        rows: list[torch.Tensor] = []
        for (start, stop), prefix in zip(pairwise(self.offset_S1), self.prefix_S, strict=True):
            own = torch.arange(start, stop)
            rows.append(own if prefix < 0 else torch.cat([rows[prefix], own]))
        return rows

    @cached_property
    def group_by_length(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Row indices of the queries and of the keys, for each distinct segment shape.

        For S segments with L queries and `before` prefix tokens each, the query rows are [S, L] and
        the key rows are [S, before + L].
        """
        shapes: dict[tuple[int, int], list[torch.Tensor]] = {}
        for (start, stop), rows in zip(pairwise(self.offset_S1), self.key_rows, strict=True):
            if stop > start:
                shapes.setdefault((stop - start, len(rows)), []).append(rows)
        stacked = [(length, torch.stack(rows)) for (length, _), rows in shapes.items()]
        return [(to_device(key_row_SM[:, -length:], self.device), to_device(key_row_SM, self.device)) for length, key_row_SM in stacked]

    @cached_property
    def max_length(self) -> int:
        """Number of tokens in the longest segment."""
        return max(stop - start for start, stop in pairwise(self.offset_S1))

    @cached_property
    def varlen_inputs(self) -> "VarlenInputs":
        """Inputs of the variable-length kernel, on the device."""
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
    """Segments in the form required by a variable-length attention kernel.

    The gathered keys and values of a segment are contiguous. The keys and values of the segment's
    prefix come first, followed by the segment's own keys and values.
    """

    cu_query_S1: torch.Tensor
    """int32 offsets of the segments in the packed queries."""
    cu_key_S1: torch.Tensor
    """int32 offsets of the segments in the gathered keys."""
    row_K: torch.Tensor | None
    """Row index into the packed keys for each gathered key; None if no segment continues another.
    """
    max_query_length: int
    max_key_length: int


VarlenKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, VarlenInputs, bool, float], torch.Tensor]
"""Function (q [T, N, D], k [K, M, D], v, segments, causal, scale) -> [T, N, D]. The causal mask is
bottom-right aligned: the last query of a segment attends to all keys of the segment.
"""


@dataclass
class SharedPromptParams(PackedSeqParams):
    """Parameters of one micro-batch, passed unchanged by Megatron to every layer.

    PackedCoreAttention reads `segments` and `cos_sin`. Transformer Engine's attention reads the
    offsets inherited from PackedSeqParams.
    """

    segments: Segments | None = None
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None = None
    """Cosines and sines [T, D] of the rotary embedding; None if Megatron applies it."""
    stacked: DeepStack | None = None
    routing: BatchRouting | None = None
    """Experts to replay or to record; None if the routers choose."""
    router_losses: BatchWeights | None = None
    """Tokens of the routers' losses; None if the pass has none."""
    delta_plan: "DeltaPlan | None" = None
    """Indices for gated delta nets; None if the model has none."""


def packed_attention(
    q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, segments: Segments, *, causal: bool, scale: float
) -> torch.Tensor:
    """Compute attention from each segment to itself and to its ancestors in the segment tree.

    Returns [T, N, D].
    """
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
    """Gather keys and values for each segment and run the variable-length kernel.

    Keys and values of a shared prefix are computed once and repeated for every segment that
    continues the prefix. In the backward pass, the gradients of the repetitions are summed.
    """
    if gathered.row_K is not None:
        k_TKD, v_TKD = k_TKD[gathered.row_K], v_TKD[gathered.row_K]
    return kernel(q_TND, k_TKD, v_TKD, gathered, causal, scale)


def has_varlen_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if attention runs torch's variable-length kernel: on CUDA, except in fp32."""
    return device.type == "cuda" and dtype != torch.float32


def varlen_attention(
    q_TND: torch.Tensor, k_KMD: torch.Tensor, v_KMD: torch.Tensor, gathered: VarlenInputs, causal: bool, scale: float
) -> torch.Tensor:
    """Run torch's variable-length attention kernel.

    Flash attention's causal mask is bottom-right aligned; `require_prefix_attention` verifies this
    on the device.
    """
    from torch.nn.attention.varlen import varlen_attn

    out_TND = varlen_attn(
        q_TND, k_KMD, v_KMD, gathered.cu_query_S1, gathered.cu_key_S1, gathered.max_query_length, gathered.max_key_length,
        scale=scale, window_size=(-1, 0) if causal else (-1, -1), enable_gqa=q_TND.shape[1] != k_KMD.shape[1],
    )  # fmt: skip
    return cast("torch.Tensor", out_TND)


def require_prefix_attention(kernel: VarlenKernel, device: torch.device, dtype: torch.dtype) -> None:
    """Raise RunFailed if the kernel's causal mask is not bottom-right aligned.

    Compares the kernel with fp32 attention on a small example with a shared prefix.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(7, heads, 64, generator=generator).to(dtype) for heads in (4, 2, 2))
    offsets, prefix_S, scale = [0, 3, 5, 7], [-1, 0, 0], 64**-0.5
    truth = packed_attention(q.float(), k.float(), v.float(), Segments(offsets, prefix_S, device=q.device), causal=True, scale=scale)
    gathered = Segments(offsets, prefix_S, device=device).varlen_inputs
    out = run_varlen_kernel(kernel, q.to(device), k.to(device), v.to(device), gathered, causal=True, scale=scale)
    if not (out.float().cpu() - truth).norm() <= PREFIX_ATTENTION_BOUND * truth.norm():
        raise RunFailed(
            f"torch={torch.__version__}: the causal mask of variable-length attention is not bottom-right aligned; "
            "install requirements/gpu.txt"
        )


def rotate_first_channels(
    q_TND: torch.Tensor, k_TKD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rotary embedding to the first R channels of each head; R is D in most models."""
    size = cos_TR.shape[1]
    if size == q_TND.shape[-1]:
        return rotate(q_TND, k_TKD, cos_TR, sin_TR)
    q_TNR, k_TKR = rotate(q_TND[..., :size], k_TKD[..., :size], cos_TR, sin_TR)
    return torch.cat([q_TNR, q_TND[..., size:]], -1), torch.cat([k_TKR, k_TKD[..., size:]], -1)


class PackedCoreAttention(MegatronModule):
    """Implementation of Megatron's `core_attention` for packed tokens.

    This class has the interface of DotProductAttention in megatron-core 0.16.1. The packed tokens
    are passed to Megatron as one sequence [T, 1, N, D] in the SBHD format. This class also applies
    the rotary embedding, in one kernel for queries and keys. Megatron would compute the cosines and
    sines again in every layer and apply the embedding in about ten kernels
    (models/common/embeddings/rope_utils.py, _apply_rotary_pos_emb_bshd).
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType, attention_type: str, **_: object
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        assert config.kv_channels is not None
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
        """Return the attention output [T, 1, N * D]."""
        q_TND, k_TKD, v_TKD = (x.squeeze(1) for x in (query, key, value))
        assert packed_seq_params.segments is not None and packed_seq_params.cos_sin is not None
        q_TND, k_TKD = rotate_first_channels(q_TND, k_TKD, *packed_seq_params.cos_sin)
        out_TND = packed_attention(q_TND, k_TKD, v_TKD, packed_seq_params.segments, causal=True, scale=self.scale)
        return out_TND.flatten(1)[:, None]
