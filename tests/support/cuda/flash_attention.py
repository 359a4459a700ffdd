"""Stand-in for torch's flash attention on the emulated device, for packed sequences.

Implements aten::_flash_attention_forward and aten::_flash_attention_backward for CUDA tensors in
plain torch, computed in float32. The checks are those of mha_varlen_fwd and mha_varlen_bwd in
torch's aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp. Mistakes for which the real
kernel reads wrong memory, without an error, raise here: offsets on another device, offsets that do
not end with the last token, a maximum length that is too small, and rows that are not aligned to 16
bytes. Outputs and workspaces are allocated as the real functions do, so that peak memory counts
them.

In shapes, T is the number of query tokens, K the number of key tokens, S the number of segments.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch

MAX_COMPUTED_TOKENS = 2048
"""Calls with more query tokens return zeros: only their memory is measured, because attention in
plain torch would need more memory than this machine has."""
ALIGNMENT_BYTES = 16
BLOCK_TOKENS = 128
skipped_calls: list[int] = []
"""Number of query tokens of each call that returned zeros."""
_library = torch.library.Library("aten", "IMPL")


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor on the same memory."""
    return torch.ops.emulated_cuda.host_alias(tensor)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"flash attention: {message}")


def check_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int, max_k: int) -> None:
    """Raise RuntimeError for inputs that the kernel rejects or for which it reads wrong memory."""
    require(q.dtype in (torch.float16, torch.bfloat16), f"only float16 and bfloat16 are supported, not {q.dtype}")
    require(k.dtype == q.dtype and v.dtype == q.dtype, f"query, key and value have dtypes {q.dtype}, {k.dtype}, {v.dtype}")
    for name, offsets in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        require(offsets.dtype == torch.int32, f"{name} must have dtype int32, not {offsets.dtype}")
        require(offsets.device == q.device, f"{name} is on {offsets.device}, the query is on {q.device}")
        require(offsets.dim() == 1 and offsets.is_contiguous(), f"{name} must be contiguous")
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        require(tensor.device == q.device, f"{name} is on {tensor.device}, the query is on {q.device}")
        require(tensor.dim() == 3 and tensor.stride(-1) == 1, f"{name} must have three dimensions, the last one contiguous")
        steps = [tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:2])]
        require(all(step % ALIGNMENT_BYTES == 0 for step in steps), f"rows of {name} are not aligned to {ALIGNMENT_BYTES} bytes: {steps}")
    heads, size = q.shape[1:]
    require(size <= 256 and size % 8 == 0, f"head size {size} is not a multiple of 8 up to 256")
    require(k.shape == v.shape and k.shape[2] == size and heads % k.shape[1] == 0, f"shapes {q.shape}, {k.shape}, {v.shape}")
    require(cu_q.shape == cu_k.shape and len(cu_q) > 1, f"{len(cu_q)} and {len(cu_k)} offsets")
    for name, offsets, rows, longest in (("query", cu_q, len(q), max_q), ("key", cu_k, len(k), max_k)):
        offset_S1 = on_host(offsets).tolist()
        lengths = [stop - start for start, stop in pairwise(offset_S1)]
        require(offset_S1[0] == 0 and min(lengths) >= 0, f"{name}: offsets {offset_S1} do not increase from 0")
        require(offset_S1[-1] == rows, f"{name}: offsets end with {offset_S1[-1]}, but there are {rows} tokens")
        require(max(lengths) <= longest, f"{name}: a segment has {max(lengths)} tokens, max_seqlen is {longest}")


def segments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, scale: float, is_causal: bool
) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield (query rows, key rows, q, k, v, scores) of each segment in float32, [heads, tokens, D].

    The causal mask is bottom-right aligned.
    """
    group = q.shape[1] // k.shape[1]
    offsets = zip(pairwise(on_host(cu_q).tolist()), pairwise(on_host(cu_k).tolist()), strict=True)
    for (start, stop), (first, last) in offsets:
        q_rows, k_rows = slice(start, stop), slice(first, last)
        of_q = on_host(q)[q_rows].float().transpose(0, 1)
        of_k, of_v = (on_host(x)[k_rows].float().transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        scores = of_q @ of_k.transpose(1, 2) * scale
        if is_causal:
            visible = torch.ones(scores.shape[1:], dtype=torch.bool).tril(last - first - (stop - start))
            scores = scores.masked_fill(~visible, -torch.inf)
        yield q_rows, k_rows, of_q, of_k, of_v, scores


def is_causal_window(is_causal: bool, left: int | None, right: int | None) -> bool:
    require(left in (None, -1) and right in (None, -1, 0), f"the window ({left}, {right}) is not part of this stand-in")
    return is_causal or right == 0


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, **options: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the output [T, heads, D], its logsumexp [heads, T] and three tensors without content."""
    check_inputs(q, k, v, cu_q, cu_k, max_q, max_k)
    require(not dropout_p and not return_debug_mask and not any(options.values()), f"{options} are not part of this stand-in")
    causal = is_causal_window(is_causal, window_size_left, window_size_right)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[1], len(q), device=q.device)
    unused = (torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device), torch.empty(0, device=q.device))
    if len(q) > MAX_COMPUTED_TOKENS:
        skipped_calls.append(len(q))
        return out.zero_(), lse.zero_(), *unused
    scale = q.shape[2] ** -0.5 if scale is None else scale
    for q_rows, _, _, _, of_v, scores in segments(q, k, v, cu_q, cu_k, scale, causal):
        on_host(lse)[:, q_rows] = scores.logsumexp(-1)
        on_host(out)[q_rows] = (scores.softmax(-1) @ of_v).transpose(0, 1).to(q.dtype)
    return out, lse, *unused


def backward(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool, *_: torch.Tensor,
    scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of q, k and v. `grad_out` may have any layout, because the real function
    makes it contiguous.
    """
    check_inputs(q, k, v, cu_q, cu_k, max_q, max_k)
    require(grad_out.dtype == q.dtype and grad_out.shape == out.shape == q.shape, f"the gradient is {grad_out.dtype} {grad_out.shape}")
    require(lse.device == q.device and grad_out.device == q.device, "the gradient or logsumexp is on another device")
    causal = is_causal_window(is_causal, window_size_left, window_size_right)
    grad_out = grad_out.contiguous()
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    workspace = allocate_workspace(q, k, num_segments=len(cu_q) - 1)
    if len(q) > MAX_COMPUTED_TOKENS:
        return dq.zero_(), dk.zero_(), dv.zero_()
    group = q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    dk_float, dv_float = torch.zeros(k.shape), torch.zeros(v.shape)
    for q_rows, k_rows, of_q, of_k, of_v, scores in segments(q, k, v, cu_q, cu_k, scale, causal):
        p = (scores - on_host(lse)[:, q_rows, None]).exp()
        grad = on_host(grad_out)[q_rows].float().transpose(0, 1)
        dp = grad @ of_v.transpose(1, 2)
        ds = p * (dp - (grad * on_host(out)[q_rows].float().transpose(0, 1)).sum(-1, keepdim=True)) * scale
        on_host(dq)[q_rows] = (ds @ of_k).transpose(0, 1).to(q.dtype)
        for whole, part in ((dk_float, ds.transpose(1, 2) @ of_q), (dv_float, p.transpose(1, 2) @ grad)):
            whole[k_rows] = part.unflatten(0, (-1, group)).sum(1).transpose(0, 1)
    on_host(dk).copy_(dk_float)
    on_host(dv).copy_(dv_float)
    del workspace
    return dq, dk, dv


def allocate_workspace(q: torch.Tensor, k: torch.Tensor, *, num_segments: int) -> list[torch.Tensor]:
    """Allocate what mha_varlen_bwd allocates: row sums, fp32 gradients of the queries, and one
    gradient of keys and values per query head if heads share keys.
    """
    heads, size = q.shape[1:]
    padded = len(q) + BLOCK_TOKENS * num_segments
    rounded = -(-size // 32) * 32 if size <= 128 else -(-size // 64) * 64
    shapes = [(heads, padded), (padded, heads, rounded)]
    made = [torch.empty(shape, device=q.device) for shape in shapes]
    if k.shape[1] != heads:
        made += [torch.empty(len(k), heads, size, dtype=q.dtype, device=q.device) for _ in range(2)]
    return made


def install() -> None:
    """Register the stand-in for CUDA tensors."""
    _library.impl("_flash_attention_forward", forward, "CUDA")
    _library.impl("_flash_attention_backward", backward, "CUDA")
