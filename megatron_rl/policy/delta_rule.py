"""Gated delta rule (arXiv 2412.06464) and causal convolution over packed segments.

A head has a state S [D, E], which is zero before the first token of a sequence. A token with query
q, key k, value v, decay a and learning rate b changes the state and has an output:

    S <- a S;    S <- S + k (b (v - S^T k))^T;    output = S^T q

Tokens are computed in chunks. Within a chunk, the changes of the state are the solution of a
triangular system that does not contain the state (arXiv 2406.06484). Only the last part of the
computation goes through the chunks in order. A segment that continues a shared prefix starts with
the state after the last chunk of the prefix. A prefix is therefore computed once for all of its
branches, and autograd sums the gradients of the branches.

In shapes, T is the number of packed tokens, N the number of chunks, C the number of tokens in a
chunk, K the number of key heads, R the number of value heads for each key head, D and E the sizes
of a key and a value head, and W the kernel size of the convolution.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.functional import pad, silu

CHUNK_SIZES = (64, 32, 16)
"""Numbers of tokens in a chunk. With large chunks, there are fewer states and fewer steps that run
in order, but short segments need more padding.
"""
MAX_PADDING = 1.5
"""Number of padded tokens per token above which a smaller chunk size is chosen, if there is one."""
NORM_EPS = 1e-6
"""Added to the squared norm of a query or key (transformers 5.19, models/qwen3_next, l2norm)."""


@dataclass(slots=True, frozen=True, kw_only=True)
class DeltaPlan:
    """Indices of one packed micro-batch, for the convolution and the gated delta rule.

    The row index T stands for a row of zeros after the last token. Chunks are sorted by wave: the
    chunks of a wave are computed together, and each continues a chunk of the previous wave.
    """

    tap_WT: torch.Tensor
    """Rows of the W - 1 tokens before each token, earliest first; T before the start of a sequence.
    """
    row_NC: torch.Tensor
    """Rows of the tokens of each chunk, padded with T."""
    slot_T: torch.Tensor
    """Position of each token in the flattened chunks."""
    wave_sizes: list[int]
    """Number of chunks of each wave."""
    parents: list[torch.Tensor]
    """For each wave but the first, the position in the previous wave of the chunk that each chunk
    continues.
    """

    def to(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "DeltaPlan":
        """Return a copy of the plan in which `move` was applied to each tensor."""
        return DeltaPlan(
            tap_WT=move(self.tap_WT), row_NC=move(self.row_NC), slot_T=move(self.slot_T), wave_sizes=self.wave_sizes,
            parents=[move(parent) for parent in self.parents],
        )  # fmt: skip


def plan_chunks(offset_S1: Sequence[int], prefix_S: Sequence[int] | None, kernel_size: int) -> DeltaPlan:
    """Cut segments into chunks and return the indices, on the host.

    `prefix_S` contains the index of each segment's prefix segment, or -1; see MicroBatch.prefix_S.
    """
    num_tokens, size, taps = offset_S1[-1], choose_chunk_size(offset_S1), []
    ends: list[tuple[torch.Tensor, int]] = []  # for each segment, its last W - 1 rows and its last chunk
    chunks: list[tuple[int, int, int, int]] = []  # wave, predecessor, first row, end row
    for segment, (start, stop) in enumerate(pairwise(offset_S1)):
        prefix = -1 if prefix_S is None else prefix_S[segment]
        before, last = (torch.full((kernel_size - 1,), num_tokens), -1) if prefix < 0 else ends[prefix]
        rows = torch.cat([before, torch.arange(start, stop)])
        taps.append(rows.unfold(0, kernel_size - 1, 1)[: stop - start])
        for first in range(start, stop, size):
            chunks.append((0 if last < 0 else chunks[last][0] + 1, last, first, min(first + size, stop)))
            last = len(chunks) - 1
        ends.append((rows[1 - kernel_size :], last))
    order = sorted(range(len(chunks)), key=lambda chunk: chunks[chunk][0])
    wave_sizes = [0] * (chunks[order[-1]][0] + 1)
    place, parents = [0] * len(chunks), [[] for _ in wave_sizes]
    row_NC, slot_T = torch.full((len(chunks), size), num_tokens), torch.empty(num_tokens, dtype=torch.long)
    for number, chunk in enumerate(order):
        wave, last, first, end = chunks[chunk]
        place[chunk] = wave_sizes[wave]
        wave_sizes[wave] += 1
        parents[wave].append(place[last])
        row_NC[number, : end - first] = torch.arange(first, end)
        slot_T[first:end] = torch.arange(number * size, number * size + end - first)
    return DeltaPlan(
        tap_WT=torch.cat(taps).t().contiguous(), row_NC=row_NC, slot_T=slot_T, wave_sizes=wave_sizes,
        parents=[torch.tensor(each) for each in parents[1:]],
    )  # fmt: skip


def choose_chunk_size(offset_S1: Sequence[int]) -> int:
    """Return the largest size with at most MAX_PADDING padded tokens per token, or the smallest."""

    def padded(size: int) -> int:
        return sum(-(-(stop - start) // size) * size for start, stop in pairwise(offset_S1))

    return next((size for size in CHUNK_SIZES if padded(size) <= MAX_PADDING * offset_S1[-1]), CHUNK_SIZES[-1])


def causal_convolution(x_TX: torch.Tensor, weight_XW: torch.Tensor, plan: DeltaPlan) -> torch.Tensor:
    """Convolve each of X channels with its own kernel and apply silu.

    The last weight of a kernel belongs to the token itself. The sum is computed in fp32.
    """
    padded, weight_WX = _with_zero_row(x_TX), weight_XW.float().t()
    total = padded[:-1] * weight_WX[-1]
    for tap_T, weight_X in zip(plan.tap_WT, weight_WX[:-1], strict=True):
        total = total + padded[tap_T] * weight_X
    return silu(total).to(x_TX.dtype)


def gated_delta_rule(
    q_TKD: torch.Tensor, k_TKD: torch.Tensor, v_TKRE: torch.Tensor, log_decay_TKR: torch.Tensor, rate_TKR: torch.Tensor, plan: DeltaPlan
) -> torch.Tensor:
    """Return the outputs [T, K, R, E] of the gated delta rule, computed in fp32.

    Queries and keys are normalized, and queries are divided by the square root of D.
    """
    q_NK1CD, k_NK1CD = (_cut(_normalize(x_TKD)[:, :, None], plan) for x_TKD in (q_TKD, k_TKD))
    q_NK1CD = q_NK1CD * q_TKD.shape[-1] ** -0.5
    v_NKRCE = _cut(v_TKRE, plan)
    rate_NKRC1, log_decay_NKRC = _cut(rate_TKR[..., None], plan), _cut(log_decay_TKR[..., None], plan).squeeze(-1)
    total_NKRC = log_decay_NKRC.cumsum(-1)
    is_later = torch.ones(total_NKRC.shape[-1], total_NKRC.shape[-1], dtype=torch.bool, device=total_NKRC.device).triu(1)
    # Masked before exp, because the exponents of later tokens are positive and may overflow.
    decay_NKRCC = (total_NKRC[..., :, None] - total_NKRC[..., None, :]).masked_fill(is_later, -torch.inf).exp()
    decay_NKRC1, remaining_NKRC1 = total_NKRC.exp()[..., None], (total_NKRC[..., -1:] - total_NKRC).exp()[..., None]
    system_NKRCC = rate_NKRC1 * (k_NK1CD @ k_NK1CD.mT) * decay_NKRCC
    solved = torch.linalg.solve_triangular(
        system_NKRCC, torch.cat([rate_NKRC1 * v_NKRCE, rate_NKRC1 * decay_NKRC1 * k_NK1CD], -1), upper=False, unitriangular=True
    )
    written, read = solved.split([v_NKRCE.shape[-1], k_NK1CD.shape[-1]], -1)
    weight_NKRCC = (q_NK1CD @ k_NK1CD.mT) * decay_NKRCC
    parts = (written, read, weight_NKRCC, q_NK1CD * decay_NKRC1, k_NK1CD * remaining_NKRC1, decay_NKRC1[..., -1:, :])
    out_NKRCE = torch.cat(_scan(zip(*(part.split(plan.wave_sizes) for part in parts), strict=True), plan.parents))
    return out_NKRCE.permute(0, 3, 1, 2, 4).flatten(0, 1)[plan.slot_T]


def _scan(waves: Iterable[tuple[torch.Tensor, ...]], parents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs of each wave's chunks, and pass the states on from wave to wave.

    A wave consists of the values written without an earlier state, the keys that read the earlier
    state, the weights of the chunk's values, the queries, the keys that write, and the decay.
    """
    outputs, state_NKRDE = [], None
    for wave, (written, read, weight, query, key, decay) in enumerate(waves):
        before_NKRDE = None if state_NKRDE is None else state_NKRDE[parents[wave - 1]]
        value = written if before_NKRDE is None else written - read @ before_NKRDE
        outputs.append(weight @ value if before_NKRDE is None else query @ before_NKRDE + weight @ value)
        if wave < len(parents):  # no chunk continues those of the last wave
            state_NKRDE = key.mT @ value
            if before_NKRDE is not None:
                state_NKRDE = torch.addcmul(state_NKRDE, decay, before_NKRDE)
    return outputs


def _normalize(x_TKD: torch.Tensor) -> torch.Tensor:
    x_TKD = x_TKD.float()
    return x_TKD * torch.rsqrt(x_TKD.square().sum(-1, keepdim=True) + NORM_EPS)


def _with_zero_row(x: torch.Tensor) -> torch.Tensor:
    return pad(x.float(), [0] * (2 * x.dim() - 1) + [1])


def _cut(x_TKRX: torch.Tensor, plan: DeltaPlan) -> torch.Tensor:
    """Return the chunks [N, K, R, C, X] of a tensor [T, K, R, X]."""
    return _with_zero_row(x_TKRX)[plan.row_NC].permute(0, 2, 3, 1, 4)
