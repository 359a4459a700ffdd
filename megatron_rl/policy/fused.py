"""A layer's norm and its gated activation: one kernel each on a GPU, plain torch on a CPU.

On a GPU autograd keeps a norm's input and a number a row, and an activation's input: what plain torch keeps beside them (three copies
of the hidden state, two of the intermediate one a layer) is what forced recomputation. On a CPU plain torch is as fast: there torch's
rms_norm is made of the same operations, and Megatron's SwiGLU would wait for a compiler first.
"""

import torch
from torch.nn.functional import rms_norm


def fused_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm, computed in fp32. In bfloat16 plain torch, as Hugging Face, rounds before the weight and after it; the kernel
    rounds once, after it: they differ by up to a unit in the last place, and the kernel is the nearer to fp32."""
    if x.is_cuda:
        return rms_norm(x, weight.shape, weight, eps)
    x_float = x.float()
    normed = x_float * torch.rsqrt(x_float.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def fuses_activation() -> bool:
    """Whether Megatron's SwiGLUFunction (0.16.1, fusions/fused_bias_swiglu.py) is used, which torch.compile makes two kernels of."""
    return torch.cuda.is_available()
