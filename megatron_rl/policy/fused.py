"""RMSNorm and gated activation: fused kernels on a GPU, plain torch on a CPU.

On a GPU the fused kernels save activation memory: autograd stores only the inputs of the norm and
of the activation, and one number per row of the norm. With plain torch, autograd would also store
three copies of the hidden state and two copies of the intermediate state per layer, so
recomputation would be needed. On a CPU, the fused kernels would not be faster: torch's rms_norm
runs the same operations as the implementation in plain torch, and Megatron's SwiGLU would have to
be compiled.
"""

import torch
from torch.nn.functional import rms_norm


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


def fuses_activation() -> bool:
    """Return True if Megatron's fused SwiGLU is used.

    Megatron's SwiGLUFunction (megatron-core 0.16.1, fusions/fused_bias_swiglu.py) is compiled into
    two kernels by torch.compile.
    """
    return torch.cuda.is_available()
