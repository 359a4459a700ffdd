"""Stand-in for torch's fused RMSNorm on the emulated device.

On a CUDA build, rms_norm calls aten::_fused_rms_norm, which saves its input, its weight and one
fp32 number per row for the backward pass. A CPU build calls a composition of operators instead,
which saves several fp32 copies of the input. The arithmetic is that of torch's decomposition of the
fused kernel, in float32 with one rounding.
"""

import torch

from tests.support.cuda.flash_attention import on_host

_library = torch.library.Library("aten", "IMPL")


class FusedNorm(torch.autograd.Function):
    """Normalizes x over its last dimension."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:  # noqa: ANN001
        out, rstd = torch.empty_like(x), torch.empty(*x.shape[:-1], 1, device=x.device)
        on_host(rstd).copy_((on_host(x).float().square().mean(-1, keepdim=True) + eps).rsqrt())
        on_host(out).copy_(on_host(x).float() * on_host(rstd) * on_host(weight).float())
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # noqa: ANN001
        x, weight, rstd = ctx.saved_tensors
        of_x, of_weight = torch.empty_like(x), torch.empty_like(weight)
        grad, rstd_host = on_host(gradient).float(), on_host(rstd)
        normed = on_host(x).float() * rstd_host
        scaled = grad * on_host(weight).float()
        on_host(of_x).copy_((scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * rstd_host)
        on_host(of_weight).copy_((grad * normed).flatten(0, -2).sum(0))
        return of_x, of_weight, None


def rms_norm(x: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None) -> torch.Tensor:
    assert weight is not None and eps is not None and list(weight.shape) == list(normalized_shape) == [x.shape[-1]]
    if x.device != weight.device:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {x.device} and {weight.device}!"
        )
    return FusedNorm.apply(x, weight, eps)


def install() -> None:
    """Register the stand-in for CUDA tensors."""
    _library.impl("rms_norm", rms_norm, "AutogradCUDA")
