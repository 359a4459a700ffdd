"""The policy on a GPU: the variable-length attention kernel, fp32 against HF on a CPU, and bfloat16
layers (ours and Transformer Engine's) against HF."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.batching.packing import pack
from megatron_rl.config import AlgoSettings, LoraSettings, ModelSettings, OptimSettings, ParallelSettings
from megatron_rl.policy.attention import Segments, packed_attention
from megatron_rl.policy.kernels import uses_transformer_engine
from megatron_rl.policy.network import TrainingSettings
from megatron_rl.policy.parallel import build_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.rollout.renderer import Renderer
from tests.support.hf_reference import compute_hf_logits
from tests.support.packed_example import make_example_items
from tests.support.parallel_layouts import full_logits
from tests.support.single_process_policy import close_with_world, single_process_world

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def make_policy(random_model: Path) -> Iterator[Callable[..., Policy]]:
    with single_process_world():
        layout = build_layout(ParallelSettings(), seed=0)
        renderer = Renderer(ModelSettings(path=str(random_model)))

        def make(dtype: str, *, lora: LoraSettings | None = None, lr: float = 1e-3, **parallel: object) -> Policy:
            return close_with_world(Policy(
                ModelSettings(path=str(random_model), dtype=dtype), layout,
                training=TrainingSettings(parallel=ParallelSettings(**parallel), optim=OptimSettings(lr=lr), num_steps=1,
                    lora=lora or LoraSettings()),
                special_tokens=renderer.special_tokens,
            ))  # fmt: skip

        yield make


def logits(policy: Policy, folder: Path) -> torch.Tensor:
    renderer = Renderer(ModelSettings(path=str(folder)))
    positions = policy.spec.rope_positions
    batch = pack(make_example_items(renderer), image_token_id=renderer.image_token_id, positions=positions, device=policy.network.device)
    return full_logits(policy, batch).float().cpu()


@pytest.mark.parametrize(("causal", "prefix_S"), [(True, None), (False, None), (True, [-1, 0, 0])])
def test_the_kernel_is_attention(causal: bool, prefix_S: list[int] | None) -> None:
    """Output and gradients of the kernel equal float64 attention on a CPU from the same bfloat16
    inputs, up to bfloat16 rounding. One case has shared prompts."""
    offsets = [0, 70, 71, 200]
    inputs = [torch.randn(200, heads, 64).bfloat16() for heads in (8, 2, 2)]
    weight = torch.randn(200, 8, 64)
    results = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float64)):
        q, k, v = (x.to(device, dtype).requires_grad_() for x in inputs)
        out = packed_attention(q, k, v, Segments(offsets, prefix_S, device=q.device), causal=causal, scale=64**-0.5)
        gradients = torch.autograd.grad((out * weight.to(device, dtype)).sum(), (q, k, v))
        results.append([x.detach().double().cpu() for x in (out, *gradients)])
    for ours, truth in zip(*results, strict=True):
        assert (ours - truth).norm() <= 1e-2 * truth.norm()


def test_fp32_is_that_of_hf(make_policy: Callable[..., Policy], random_model: Path) -> None:
    """fp32 logits on the GPU equal HF's on a CPU within 1e-4."""
    truth = compute_hf_logits(random_model, torch.float32)
    assert (logits(make_policy("float32"), random_model) - truth).abs().max() <= 1e-4


WITH_TE = pytest.mark.skipif(not uses_transformer_engine(LoraSettings()), reason="no Transformer Engine: NOT tested")


@pytest.mark.parametrize("layers", ["ours", pytest.param("te", marks=WITH_TE)])
def test_bfloat16_is_as_near_to_the_truth_as_hf_is(layers: str, make_policy: Callable[..., Policy], random_model: Path) -> None:
    """The error of bfloat16 logits against HF's fp32 logits is at most 1.2 times that of HF's
    bfloat16 logits. With adapters the layers are always ours, and new adapters change nothing."""
    truth, theirs = (compute_hf_logits(random_model, dtype) for dtype in (torch.float32, torch.bfloat16))
    ours = logits(make_policy("bfloat16", lora=LoraSettings(rank=4) if layers == "ours" else None), random_model)
    assert (ours - truth).norm() <= 1.2 * (theirs - truth).norm()


def test_an_update_with_everything_offloaded(make_policy: Callable[..., Policy], random_model: Path) -> None:
    """An update with optimizer and parameters offloaded to the host gives the same step as without
    offloading.

    Near 1, where the weights of norms start, bfloat16 has a spacing of 0.004 to 0.008; a smaller
    learning rate would change none of them.
    """
    renderer = Renderer(ModelSettings(path=str(random_model)))
    stays, leaves = make_policy("bfloat16", lr=1e-2), make_policy("bfloat16", lr=1e-2, offload_optimizer=True, offload_params=True)
    leaves.sleep()
    leaves.wake()
    assert all(host.is_pinned() for _, host in leaves.network._offload.host.pairs)
    before = {name: tensor.float().clone() for name, tensor in stays.hf_weights()}
    for policy in (stays, leaves):
        policy.update(policy.pack(make_example_items(renderer), max_tokens=200), make_policy_objective(AlgoSettings()), step=0)
    for (name, ours), (_, theirs) in zip(leaves.hf_weights(), stays.hf_weights(), strict=True):
        change = theirs.float() - before[name]
        assert change.norm() > 0, name
        assert (ours.float() - theirs.float()).norm() <= 0.1 * change.norm(), name
