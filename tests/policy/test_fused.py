"""GPU kernels, as in torch's and Megatron's sources, in place of plain torch operations: results
are equal up to fp32 rounding."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import silu
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP, apply_rotary_pos_emb_vision

from megatron_rl.config import OptimSettings
from megatron_rl.policy import transformer, vision
from megatron_rl.policy.fused import fused_gated_mlp, fused_rms_norm, fused_swiglu, rotate
from tests.support import gpu_kernel_stubs
from tests.support.packed_example import make_example_items
from tests.support.parallel_layouts import compute_gradients
from tests.support.single_process_policy import make_policy_and_renderer, single_process_world


def test_logprobs_and_gradients_are_those_of_plain_torch(random_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logprobs and gradients equal those of plain torch within 1e-5, for norms and activations of
    decoder and vision tower. The gradients differ in some bits, which proves that the kernels
    ran."""
    found = []
    with single_process_world():
        for is_fused in (False, True):
            if is_fused:
                gpu_kernel_stubs.patch_kernels(monkeypatch)
            policy, renderer = make_policy_and_renderer(random_model, OptimSettings(lr=1e-3))
            batches = policy.pack(make_example_items(renderer), max_tokens=10_000)
            found.append((policy.logprobs(batches), compute_gradients(policy, batches)))
            assert policy.network.chunks[0].config.bias_activation_fusion == is_fused
    (plain, plain_gradients), (fused, fused_gradients) = found
    assert all((a - b).abs().max() <= 1e-5 for a, b in zip(plain, fused, strict=True))
    assert any(not torch.equal(gradient, plain_gradients[name]) for name, gradient in fused_gradients.items())
    for name, gradient in fused_gradients.items():
        assert (gradient - plain_gradients[name]).norm() <= 1e-5 * plain_gradients[name].norm(), name


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_the_kernel_rounds_once(dtype: torch.dtype, bound: float) -> None:
    """The fused norm rounds only once: in bfloat16 it is within 2^-7 (one unit in the last place)
    of plain torch, and closer to float64 than plain torch is."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 512).to(dtype), (1 + 0.2 * torch.randn(512)).to(dtype)
    plain, kernel = fused_rms_norm(x, weight, 1e-6), gpu_kernel_stubs.FusedNorm.apply(x, weight, 1e-6)
    truth = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    assert ((plain.double() - kernel.double()).abs() <= bound * truth.abs()).all()
    assert (kernel.double() - truth).norm() <= (plain.double() - truth).norm() + 1e-12


def test_a_norm_on_a_gpu_is_one_kernel_and_keeps_a_number_a_row() -> None:
    """The norm on a GPU is one kernel that saves one fp32 value per row.

    By torch's operator schema it has a second result of [rows, 1] in fp32, which its backward
    requires beside the input.
    """
    with FakeTensorMode(), torch.no_grad():
        x, weight = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in ((6, 1, 8), (8,)))
        assert fused_rms_norm(x, weight, 1e-6).dtype == torch.bfloat16
        assert [(tuple(out.shape), out.dtype) for out in torch._fused_rms_norm(x, (8,), weight, 1e-6)][1] == ((6, 1, 1), torch.float32)
    asked = {argument.name for argument in torch.ops.aten._fused_rms_norm_backward.default._schema.arguments}
    assert {"grad_out", "input", "rstd", "weight"} <= asked


def test_the_activation_is_plain_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused activation equals silu(first half) * second half in float64, with its gradient, and
    saves only its input."""
    gpu_kernel_stubs.patch_kernels(monkeypatch)
    y = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 6, dtype=torch.float64)
    plain, ours = silu(y[:, :6]) * y[:, 6:], fused_swiglu(y)
    assert [saved.data_ptr() for saved in ours.grad_fn.saved_tensors] == [y.data_ptr()]
    expected, found = (torch.autograd.grad((out * weight).sum(), y)[0] for out in (plain, ours))
    assert torch.allclose(ours, plain, atol=1e-14)
    assert torch.allclose(found, expected, atol=1e-14)


def test_on_a_cpu_nothing_is_compiled() -> None:
    """The fused activation is used only with CUDA, and the decoder and the vision tower use the
    same norm."""
    assert transformer.fuses_activation() == torch.cuda.is_available()
    assert vision.fused_rms_norm is transformer.fused_rms_norm is fused_rms_norm


def test_the_gated_mlp_is_that_of_hugging_face(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused gated MLP equals Hugging Face's in float64, with the gradients of input and
    parameters, for widths that must be padded and for one that need not be."""
    gpu_kernel_stubs.patch_kernels(monkeypatch)
    for width in (37, 64, 65):
        torch.manual_seed(width)
        theirs = Qwen2_5_VLMLP(Namespace(hidden_size=12, intermediate_size=width, hidden_act="silu"), bias=True).double()
        x = torch.randn(9, 12, dtype=torch.float64, requires_grad=True)
        ours = fused_gated_mlp(x, theirs.gate_proj, theirs.up_proj, theirs.down_proj)
        asked = [x, *theirs.parameters()]
        pairs = zip(*(torch.autograd.grad((out * out).sum(), asked) for out in (ours, theirs(x))), strict=True)
        assert torch.allclose(ours, theirs(x), atol=1e-14)
        assert all(torch.allclose(a, b, atol=1e-13) for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rotation_is_that_of_hugging_face(dtype: torch.dtype) -> None:
    """The rotary embedding equals Hugging Face's bit for bit, also with fewer key heads."""
    q, k = torch.randn(5, 4, 16).to(dtype), torch.randn(5, 2, 16).to(dtype)
    angles = torch.randn(5, 8).repeat(1, 2)
    for ours, theirs in zip(
        rotate(q, k, angles.cos(), angles.sin()), apply_rotary_pos_emb_vision(q, k, angles.cos(), angles.sin()), strict=True
    ):
        assert ours.dtype == dtype and torch.equal(ours, theirs)
