"""DeepStack embeddings that decoder layers add: gradients against plain autograd's, and no
gradients for a frozen vision tower."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_rl.compat.megatron_cpu import megatron_on_cpu
from megatron_rl.policy.deepstack import DeepStack, add_to_layer, split_embeddings
from tests.memory_plan.test_activations import FROZEN, MADE, batch_of, build
from tests.support.single_process_policy import single_process_world


@pytest.mark.parametrize("is_trained", [True, False])
def test_gradients_are_those_of_plain_additions(is_trained: bool) -> None:
    """Outputs and gradients of two layers that multiply and add embeddings of five tokens equal
    those of plain additions."""
    generator = torch.Generator().manual_seed(0)
    embedded = torch.randn(5, 1, 12, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 5, 1, 4, generator=generator, dtype=torch.float64)
    hidden, stacked = split_embeddings(embedded, 4, is_trained=is_trained)
    named = {"packed_seq_params": SimpleNamespace(stacked=stacked)}
    for number in range(2):
        hidden, _ = add_to_layer(number, nn.Identity(), (), named, (hidden * weights[number], None))
    (ours,) = torch.autograd.grad((hidden * weights[2]).sum(), embedded)
    first, second, third = embedded.split(4, -1)
    plain = ((first * weights[0] + second) * weights[1] + third) * weights[2]
    (theirs,) = torch.autograd.grad(plain.sum(), embedded)
    assert torch.allclose((hidden * weights[2]).detach(), plain.detach())
    assert torch.allclose(ours, theirs if is_trained else theirs * torch.tensor([1.0] * 4 + [0.0] * 8))
    assert [gradient is not None for gradient in stacked.gradients] == [is_trained] * 2


@pytest.mark.parametrize(("lora", "frozen", "is_kept"), [(0, [], True), (0, ["vision"], True), (0, FROZEN, False), (4, [], False)])
def test_a_frozen_tower_leaves_no_gradients(lora: int, frozen: list[str], is_kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepStack gradients of a whole model are stored only if vision tower or merger is trained.

    They are not stored with adapters in the language model, where the output of the frozen
    embeddings still requires a gradient.
    """
    with single_process_world():
        chunk = build(MADE["qwen3_vl"](4), torch.float32, lora=lora, frozen=frozen)
        seen: list[DeepStack] = []
        packed = chunk.module._packed
        monkeypatch.setattr(chunk.module, "_packed", lambda batch, angles, stacked: seen.append(stacked) or packed(batch, angles, stacked))
        with megatron_on_cpu():
            chunk(batch_of(32, num_patches=64), torch.arange(8)).sum().backward()
        assert len(seen[0].added) == 2 and [gradient is not None for gradient in seen[0].gradients] == [is_kept] * 2
