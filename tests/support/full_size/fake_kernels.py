"""Replaces compiled and fused kernels for FakeTensors by functions that allocate and save what the
kernels do: their results, the tensors for the backward pass, and no temporary tensors.

On a GPU, tests/gpu/test_memory_on_gpu.py and test_fused_on_gpu.py confirm these sizes.
"""

from types import FunctionType
from typing import cast

import torch
from megatron.core.fusions import fused_bias_swiglu

from megatron_rl.policy import fused, logprobs


class Norm(torch.autograd.Function):
    """Saves what aten::_fused_rms_norm saves: its input, its weight and one fp32 number per row."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # noqa: ANN001
        assert x.device == weight.device and x.shape[-1:] == weight.shape
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN001
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class Rotation(torch.autograd.Function):
    """Saves only the cosines and sines."""

    @staticmethod
    def forward(ctx, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN001
        assert q.device == k.device == cos.device == sin.device
        ctx.save_for_backward(cos, sin)
        return torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(k.shape, dtype=k.dtype, device=k.device)

    @staticmethod
    def backward(ctx, of_q: torch.Tensor, of_k: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN001
        return *(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (of_q, of_k)), None, None


def swiglu(y: torch.Tensor) -> torch.Tensor:
    return y.new_empty(*y.shape[:-1], y.shape[-1] // 2)


def swiglu_gradient(gradient: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    assert gradient.device == y.device
    return torch.empty_like(y)


def row_peak(logits_RV: torch.Tensor, *_: object) -> torch.Tensor:
    return logits_RV.new_empty(len(logits_RV), dtype=torch.float32)


def row_sums(logits_RV: torch.Tensor, *_: object) -> torch.Tensor:
    return logits_RV.new_empty(3, len(logits_RV), dtype=torch.float32)


def logit_gradient(logits_RV: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(logits_RV)


LOGPROB_FUNCTIONS = {"_row_peak": row_peak, "_row_sums": row_sums, "_logit_gradient": logit_gradient, "_row_sum_exp": row_peak}
"""Replacements of the compiled functions of policy/logprobs.py, by name."""


def install() -> None:
    """Replace the kernels, for the rest of this process."""
    fused.rms_norm = lambda x, _, weight, eps: Norm.apply(x, weight)
    fused._rotate_on_gpu = Rotation.apply
    fused_bias_swiglu.swiglu, fused.swiglu_gradient = swiglu, swiglu_gradient
    logprobs._COMPILED = tuple(LOGPROB_FUNCTIONS[cast("FunctionType", function).__name__] for function in logprobs._EAGER)
