"""Third-party kernels against our layers on the same weights and tokens: Transformer Engine's
layers and fused gradient accumulation."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel import layers

from megatron_rl.batching.packing import pack
from megatron_rl.config import LoraSettings, OptimSettings
from megatron_rl.policy import policy, transformer
from megatron_rl.policy.kernels import uses_transformer_engine
from tests.support.packed_example import make_example_items
from tests.support.parallel_layouts import compute_gradients, full_logits
from tests.support.single_process_policy import make_policy_and_renderer, single_process_world

pytestmark = pytest.mark.gpu
WITH_TE = pytest.mark.skipif(not uses_transformer_engine(LoraSettings()), reason="no Transformer Engine that works: NOT tested")
FUSED = pytest.mark.skipif(not layers._grad_accum_fusion_available, reason="no apex with its fused accumulation: NOT tested")


@pytest.fixture
def measured(random_model: Path) -> Iterator[Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
    """Return a function that computes logits, and gradients by Hugging Face's names, of a policy
    after `prepare`."""

    def measure(prepare: Callable[[torch.nn.Module], None] = lambda chunks: None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        made, renderer = make_policy_and_renderer(random_model, OptimSettings(), dtype="bfloat16")
        prepare(made.network.chunks)
        how = {"image_token_id": renderer.image_token_id, "positions": made.spec.rope_positions, "device": made.network.device}
        batch = pack(make_example_items(renderer), **how)
        return full_logits(made, batch).float(), {name: gradient.float() for name, gradient in compute_gradients(made, [batch]).items()}

    with single_process_world():
        yield measure


def assert_near(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor], *, bound: float) -> None:
    assert theirs.keys() == ours.keys()
    far = {name: float((theirs[name] - ours[name]).norm() / ours[name].norm()) for name in ours}
    assert max(far.values()) <= bound, far


@WITH_TE
def test_transformer_engines_layers_are_ours(measured: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and gradients of four Transformer Engine layers equal those of our layers, up to
    bfloat16 rounding."""
    logits, theirs = measured()
    for module in (policy, transformer):
        monkeypatch.setattr(module, "uses_transformer_engine", lambda lora: False)
    our_logits, ours = measured()
    assert (logits - our_logits).norm() <= 2e-2 * our_logits.norm()
    assert_near(theirs, ours, bound=5e-2)


@FUSED
def test_gradients_that_are_added_in_the_product_are_the_plain_ones(measured: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients accumulated by apex's fused kernel equal the plain ones within 1%.

    The kernel adds a weight's gradient to its fp32 buffer inside the matrix product; our layers
    round it to bfloat16 before.
    """
    for module in (policy, transformer):
        monkeypatch.setattr(module, "uses_transformer_engine", lambda lora: False)
    _, plain = measured()
    _, fused = measured(fuse)
    assert_near(fused, plain, bound=1e-2)


def fuse(chunks: torch.nn.Module) -> None:
    linears = [module for module in chunks.modules() if isinstance(module, layers.ColumnParallelLinear | layers.RowParallelLinear)]
    assert linears
    for linear in linears:
        linear.gradient_accumulation_fusion = True
