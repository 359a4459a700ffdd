"""Packed attention against a textbook loop over segments in float64."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_rl.errors import RunFailed
from megatron_rl.policy.attention import Segments, VarlenInputs, packed_attention, require_prefix_attention, run_varlen_kernel


def textbook(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: list[int], prefix_S: list[int], *, causal: bool) -> torch.Tensor:
    """Compute attention one query at a time: a softmax over the visible keys of its own segment and
    of all segments that its segment continues."""
    out = torch.zeros_like(q)
    repeat = q.shape[1] // k.shape[1]
    for segment, (start, stop) in enumerate(itertools.pairwise(offsets)):
        before, prefix = [], prefix_S[segment]
        while prefix >= 0:
            before, prefix = [*range(offsets[prefix], offsets[prefix + 1]), *before], prefix_S[prefix]
        for t in range(start, stop):
            seen = before + list(range(start, t + 1 if causal else stop))
            for head in range(q.shape[1]):
                scores = k[seen, head // repeat] @ q[t, head] / math.sqrt(q.shape[2])
                out[t, head] = scores.softmax(0) @ v[seen, head // repeat]
    return out


def bottom_right(
    q_TND: torch.Tensor, k_KMD: torch.Tensor, v_KMD: torch.Tensor, cut: VarlenInputs, causal: bool, scale: float
) -> torch.Tensor:
    """Stand in for torch's kernel, with its contract: each segment separately, with a causal mask
    aligned to the last key."""
    queries, keys = pairs(cut.cu_query_S1), pairs(cut.cu_key_S1)
    assert cut.max_query_length == max(b - a for a, b in queries) and cut.max_key_length == max(b - a for a, b in keys)
    assert keys[-1][1] == len(k_KMD) == len(v_KMD) and cut.cu_query_S1.dtype == cut.cu_key_S1.dtype == torch.int32
    return torch.cat([aligned(q_TND[a:b], k_KMD[c:d], v_KMD[c:d], causal, scale) for (a, b), (c, d) in zip(queries, keys, strict=True)])


def aligned(
    q_LND: torch.Tensor, k_RMD: torch.Tensor, v_RMD: torch.Tensor, causal: bool, scale: float, *, to_first: bool = False
) -> torch.Tensor:
    """Compute attention of one segment.

    `to_first` aligns the mask to the first key, the bug that `require_prefix_attention` detects.
    """
    mask = torch.ones(len(q_LND), len(k_RMD), dtype=torch.bool)
    mask = mask.tril(0 if to_first else len(k_RMD) - len(q_LND)) if causal else mask
    q, k, v = (x.transpose(0, 1) for x in (q_LND, k_RMD, v_RMD))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True).transpose(0, 1)


def pairs(offsets: torch.Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise(offsets.tolist()))


@pytest.mark.known_failure("packed-attention")
@pytest.mark.parametrize(
    ("offsets", "prefix_S", "causal"),
    [
        ([0, 5], [-1], True),
        ([0, 3, 6, 7, 10], [-1] * 4, True),
        ([0, 3, 6, 7, 10], [-1] * 4, False),
        ([0, 4, 7, 10, 11, 15, 16], [-1, 0, 0, 0, -1, 4], True),
        ([0, 2, 2, 5], [-1, -1, 0], True),
        ([0, 3, 5, 9, 11, 12, 15, 17], [-1, 0, 1, 0, 3, -1, 2], True),
    ],
)
@pytest.mark.parametrize("how", ["dense", "kernel"])
def test_segments_see_themselves_and_what_they_continue(how: str, offsets: list[int], prefix_S: list[int], causal: bool) -> None:
    """Outputs and gradients equal the textbook loop, both for dense calls on segments of equal
    shape and for the inputs of a GPU kernel."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(offsets[-1], heads, 8, generator=generator, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    segments = Segments(offsets, prefix_S, device=q.device)
    if how == "kernel":
        out = run_varlen_kernel(bottom_right, q, k, v, segments.varlen_inputs, causal=causal, scale=8**-0.5)
    else:
        out = packed_attention(q, k, v, segments, causal=causal, scale=8**-0.5)
    expected = textbook(q, k, v, offsets, prefix_S, causal=causal)
    assert torch.allclose(out, expected, atol=1e-12)
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    ours = torch.autograd.grad((out * weight).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, theirs, strict=True))


def test_a_kernel_that_is_aligned_otherwise_is_refused() -> None:
    """A kernel whose causal mask is aligned to the first key is rejected, as in flash attention
    before version 2.1."""

    def top_left(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cut: VarlenInputs, causal: bool, scale: float) -> torch.Tensor:
        parts = zip(pairs(cut.cu_query_S1), pairs(cut.cu_key_S1), strict=True)
        return torch.cat([aligned(q[a:b], k[c:d], v[c:d], causal, scale, to_first=True) for (a, b), (c, d) in parts])

    cpu = torch.device("cpu")
    require_prefix_attention(bottom_right, cpu, torch.bfloat16)
    for kernel in (top_left, lambda *given: bottom_right(*given) * math.nan):
        with pytest.raises(RunFailed, match="is not bottom-right aligned"):
            require_prefix_attention(kernel, cpu, torch.bfloat16)
