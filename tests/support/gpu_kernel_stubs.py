"""Replaces GPU kernels on a CPU, with the results and the saved tensors of the kernels: torch's own
decomposition of its fused norm, the compiled functions of Megatron and of this project without
compilation, and attention over gathered keys.

Each kernel is a single operation for dispatch modes; its temporary tensors are not visible to them.
"""

from collections.abc import Callable

import pytest
import torch
from megatron.core.fusions import fused_bias_swiglu
from torch._decomp.decompositions import _fused_rms_norm, _fused_rms_norm_backward
from torch.utils._python_dispatch import _disable_current_modes

from megatron_rl.policy import attention, experts, fused, gated_delta_net, logprobs, transformer, vision
from megatron_rl.policy.attention import VarlenInputs
from tests.policy.test_attention import bottom_right


def run_unwatched(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(*args: object) -> torch.Tensor:
        with _disable_current_modes():
            made = compute(*args)
        return made.clone()

    return run


class FusedNorm(torch.autograd.Function):
    """Saves the inputs of aten::_fused_rms_norm_backward: input, weight, and one fp32 statistic per
    row.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:  # noqa: ANN001
        rstd = run_unwatched(lambda: _fused_rms_norm(x, list(weight.shape), weight, eps)[1])()
        ctx.save_for_backward(x, rstd, weight)
        return run_unwatched(lambda: _fused_rms_norm(x, list(weight.shape), weight, eps)[0])()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # noqa: ANN001
        x, rstd, weight = ctx.saved_tensors
        given = (gradient, x, list(weight.shape), rstd, weight, [True, True])
        of_x, of_weight = (run_unwatched(lambda which=which: _fused_rms_norm_backward(*given)[which])() for which in (0, 1))
        return of_x, of_weight, None


class Rotation(torch.autograd.Function):
    """Saves only the cosines and sines; the backward pass rotates in the other direction."""

    @staticmethod
    def forward(
        ctx, q_TND: torch.Tensor, k_TKD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor,  # noqa: ANN001
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        ctx.save_for_backward(cos_TD, sin_TD)
        return rotate_unwatched(q_TND, k_TKD, cos_TD, sin_TD)

    @staticmethod
    def backward(ctx, grad_q_TND: torch.Tensor, grad_k_TKD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN001
        cos_TD, sin_TD = ctx.saved_tensors
        return *rotate_unwatched(grad_q_TND, grad_k_TKD, cos_TD, -sin_TD), None, None


def rotate_unwatched(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(run_unwatched(lambda which=which: fused._rotate(*given)[which])() for which in (0, 1))


class VarlenAttention(torch.autograd.Function):
    """Saves what flash attention saves: its inputs, its output, and one fp32 statistic per query
    and head.
    """

    @staticmethod
    def forward(
        ctx, q_TND: torch.Tensor, k_KMD: torch.Tensor, v_KMD: torch.Tensor, cut: VarlenInputs, causal: bool, scale: float,  # noqa: ANN001
    ) -> torch.Tensor:  # fmt: skip
        out_TND = run_unwatched(lambda: bottom_right(q_TND, k_KMD, v_KMD, cut, causal, scale))()
        ctx.save_for_backward(q_TND, k_KMD, v_KMD, out_TND, torch.zeros(q_TND.shape[:2]))
        ctx.given = cut, causal, scale
        return out_TND

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN001
        saved = ctx.saved_tensors[:3]

        def of(which: int) -> torch.Tensor:
            with torch.enable_grad():
                inputs = [tensor.detach().requires_grad_() for tensor in saved]
                return torch.autograd.grad(bottom_right(*inputs, *ctx.given), inputs[which], gradient)[0]

        return *(run_unwatched(lambda which=which: of(which))() for which in range(3)), None, None, None


def patch_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace varlen attention, as in bfloat16 on a GPU."""
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda device, dtype: True)
    monkeypatch.setattr(attention, "varlen_attention", VarlenAttention.apply)


def patch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build and run the policy with the kernels it uses on a GPU."""
    for module in (transformer, vision, gated_delta_net):
        monkeypatch.setattr(module, "fused_rms_norm", FusedNorm.apply)
    monkeypatch.setattr(transformer, "zero_centered_rms_norm", lambda x, w, eps: FusedNorm.apply(x.float(), 1 + w.float(), eps).to(x.dtype))
    for module in (attention, vision):
        monkeypatch.setattr(module, "rotate", Rotation.apply)
    monkeypatch.setattr(experts, "swiglu", fused.fused_swiglu)
    monkeypatch.setattr(vision, "gated_mlp", fused.fused_gated_mlp)
    monkeypatch.setattr(logprobs, "_EAGER", tuple(map(run_unwatched, logprobs._EAGER)))
    monkeypatch.setattr(transformer, "fuses_activation", lambda: True)
    monkeypatch.setattr(fused_bias_swiglu, "swiglu", run_unwatched(fused_bias_swiglu.swiglu._torchdynamo_orig_callable))
    monkeypatch.setattr(fused, "swiglu_gradient", run_unwatched(fused.swiglu_gradient._torchdynamo_orig_callable))
