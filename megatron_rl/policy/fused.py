"""RMSNorm, rotary embedding and gated MLP: fused kernels on a GPU, plain torch on a CPU.

On a GPU the fused kernels save activation memory: autograd stores only the inputs of the norm and
of the activation, and one number per row of the norm. With plain torch, autograd would also store
three copies of the hidden state and two copies of the intermediate state per layer, so
recomputation would be needed. On a CPU, the fused kernels would not be faster: torch's rms_norm
runs the same operations as the implementation in plain torch, and Megatron's SwiGLU and the rotary
embedding would have to be compiled.
"""

from collections.abc import Callable
from functools import partial

import torch
from megatron.core.fusions import fused_bias_swiglu
from torch import nn
from torch.nn.functional import linear, pad, rms_norm, silu

WIDTH_MULTIPLE = 64
"""Multiple to which the width of a fused MLP is padded.

The MLPs of Qwen2.5-VL's vision tower have 3,420 columns. A row of 3,420 bfloat16 values is not a
multiple of 16 bytes, so cuBLAS uses slow kernels: on an H100, the products take three times as long
as with 3,456 columns (benchmarks/results/h100_2026-11-27.md).
"""


def fused_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Apply RMSNorm, computed in fp32.

    In bfloat16, plain torch rounds before and after the multiplication by the weight, as Hugging
    Face does. The fused kernel rounds once, after the multiplication. The two results differ by up
    to one unit in the last place; the result of the fused kernel is closer to the fp32 result.
    """
    if x.is_cuda:
        return rms_norm(x, weight.shape, weight, eps)
    x_float = x.float()
    normed = x_float * torch.rsqrt(x_float.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def zero_centered_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Apply RMSNorm, multiplied by 1 + weight; computed in fp32 and rounded once.

    The sum is not rounded to the dtype of `weight`, which would lose most of a small weight.
    """
    x_float, scale = x.float(), 1 + weight.float()
    if x.is_cuda:
        return rms_norm(x_float, scale.shape, scale, eps).to(x.dtype)
    return (x_float * torch.rsqrt(x_float.square().mean(-1, keepdim=True) + eps) * scale).to(x.dtype)


def gated_mlp(x: torch.Tensor, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> torch.Tensor:
    """Apply a gated MLP, down(silu(gate(x)) * up(x)), to x [P, H]."""
    return fused_gated_mlp(x, gate, up, down) if x.is_cuda else down(silu(gate(x)) * up(x))


def fused_gated_mlp(x: torch.Tensor, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> torch.Tensor:
    """Compute gate and up projection as one matrix product, and pad their width with zeros.

    The padding does not change the result, because silu(0) * 0 = 0.
    """
    bias = torch.cat([_pad_rows(gate.bias), _pad_rows(up.bias)])
    gated = fused_swiglu(_RebuiltLinear.apply(x, bias, _stack_padded, gate.weight, up.weight))
    return _RebuiltLinear.apply(gated, down.bias, _pad_columns, down.weight)


def _pad_rows(x: torch.Tensor) -> torch.Tensor:
    return pad(x, [0] * (2 * x.dim() - 1) + [-x.shape[0] % WIDTH_MULTIPLE])


def _pad_columns(weight: torch.Tensor) -> torch.Tensor:
    return pad(weight, (0, -weight.shape[1] % WIDTH_MULTIPLE))


def _stack_padded(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.cat([_pad_rows(gate), _pad_rows(up)])


class _RebuiltLinear(torch.autograd.Function):
    """Linear layer whose weight is computed from parameters, again in the backward pass.

    The weight is therefore not stored in addition to the parameters.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, bias: torch.Tensor, build: Callable[..., torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:  # noqa: ANN001
        ctx.build = build
        ctx.save_for_backward(x, *parameters)
        return linear(x, build(*parameters), bias)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN001
        x, *saved = ctx.saved_tensors
        needs_x, needs_bias, _, *needs_parameters = ctx.needs_input_grad
        with torch.enable_grad():
            parameters = [parameter.detach().requires_grad_() for parameter in saved]
            weight = ctx.build(*parameters)
        of_parameters = torch.autograd.grad(weight, parameters, grad.t() @ x) if any(needs_parameters) else [None] * len(saved)
        return grad @ weight.detach() if needs_x else None, grad.sum(0) if needs_bias else None, None, *of_parameters


def rotate(q_TND: torch.Tensor, k_TKD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rotary embedding to queries and keys.

    The rotation pairs channel d with channel d + D / 2 (arXiv 2104.09864, as in Hugging Face's
    rotate_half) and is computed in fp32.
    """
    return (_rotate_on_gpu if q_TND.is_cuda else _rotate)(q_TND, k_TKD, cos_TD, sin_TD)


def _rotate(q_TND: torch.Tensor, k_TKD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos_T1D, sin_T1D = cos_TD[:, None].float(), sin_TD[:, None].float()

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.float().chunk(2, -1)
        return (x.float() * cos_T1D + torch.cat((-second, first), -1) * sin_T1D).to(x.dtype)

    return turned(q_TND), turned(k_TKD)


_rotate_on_gpu = torch.compile(_rotate, dynamic=True)


def fused_swiglu(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [..., F], where gate and up are the halves of x [..., 2F].

    Only `x` is saved for the backward pass, and each pass is one kernel.
    """
    return _SwiGLU.apply(x)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [..., F], where gate and up are the halves of x [..., 2F]."""
    if x.is_cuda:
        return fused_swiglu(x)
    gate, up = x.chunk(2, -1)
    return silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    """Megatron's SwiGLUFunction (megatron-core 0.16.1) with another backward pass."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN001
        ctx.save_for_backward(x)
        return fused_bias_swiglu.swiglu(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:  # noqa: ANN001
        return swiglu_gradient(grad, *ctx.saved_tensors)


@partial(torch.compile, options={"max_pointwise_cat_inputs": 0, "max_complex_pointwise_cat_inputs": 0})
def swiglu_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x [..., 2F] from the gradient of fused_swiglu(x) [..., F].

    With the default options, torch.compile writes both halves in one loop over 2F columns, which
    evaluates both formulas for each column. With these options, it loops over F columns.
    """
    gate, up = x.chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    return torch.cat((grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid), -1)


def fuses_activation() -> bool:
    """Return True if the activation of an MLP is computed by fused kernels."""
    return torch.cuda.is_available()
