"""Packed attention against a textbook loop over segments, in float64."""

import itertools
import math

import pytest
import torch

from megatron_rl.policy.attention import packed_attention


def textbook(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: list[int], prefix_S: list[int], *, causal: bool) -> torch.Tensor:
    """One query at a time: softmax over the keys it may see, in its own segment and the one its segment continues."""
    out = torch.zeros_like(q)
    repeat = q.shape[1] // k.shape[1]
    for segment, (start, stop) in enumerate(itertools.pairwise(offsets)):
        prefix = prefix_S[segment]
        before = list(range(offsets[prefix], offsets[prefix + 1])) if prefix >= 0 else []
        for t in range(start, stop):
            seen = before + list(range(start, t + 1 if causal else stop))
            for head in range(q.shape[1]):
                scores = k[seen, head // repeat] @ q[t, head] / math.sqrt(q.shape[2])
                out[t, head] = scores.softmax(0) @ v[seen, head // repeat]
    return out


@pytest.mark.parametrize(
    ("offsets", "prefix_S", "causal"),
    [
        ([0, 5], [-1], True),
        ([0, 3, 6, 7, 10], [-1] * 4, True),
        ([0, 3, 6, 7, 10], [-1] * 4, False),
        ([0, 4, 7, 10, 11, 15, 16], [-1, 0, 0, 0, -1, 4], True),
        ([0, 2, 2, 5], [-1, -1, 0], True),
    ],
)
def test_segments_see_themselves_and_what_they_continue(offsets: list[int], prefix_S: list[int], causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(offsets[-1], heads, 8, generator=generator, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    out = packed_attention(q, k, v, torch.tensor(offsets), causal=causal, scale=8**-0.5, prefix_S=prefix_S)
    expected = textbook(q, k, v, offsets, prefix_S, causal=causal)
    assert torch.allclose(out, expected, atol=1e-12)
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    ours = torch.autograd.grad((out * weight).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, theirs, strict=True))
