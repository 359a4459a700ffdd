"""A batch packed as a prefix tree computes the same as each sequence alone, within 1e-5 in fp32.

Every layout is compared with Hugging Face in tests/parity.
"""

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.batching.minibatches import PackItem, pack_costs, split_by_cost
from megatron_rl.batching.packing import pack
from megatron_rl.compat.megatron_cpu import megatron_on_cpu
from megatron_rl.config import CriticSettings, LoraSettings, OptimSettings
from megatron_rl.policy.policy import Policy
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Image, MicroBatch, TokenSequence
from megatron_rl.weights.stream import is_adapter
from tests.support.packed_example import make_picture, user_message
from tests.support.single_process_policy import make_policy_and_renderer, single_process_world

LORA = LoraSettings(rank=4, alpha=8.0, targets=["attention", "mlp", "vision", "projector"])
TREES = st.lists(st.lists(st.sampled_from("12xyab"), max_size=10), min_size=2, max_size=6)
"""Tokens of each sequence: digits are observed, x and y are sampled, a and b are images."""


def grown(parts: list[str], shown: dict[str, Image], renderer: Renderer) -> TokenSequence:
    made = TokenSequence()
    for part in parts:
        if part in shown:
            made.extend([renderer.image_token_id] * shown[part].num_tokens, images=(shown[part],))
        else:
            made.extend([ord(part)], logprobs=[-1.0] if part in "xy" else None)
    return made


def said(policy: Policy, *batches: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return logprob, entropy and value [3, R] of each sampled token, and the gradient of their
    weighted sum over all batches. Each token has its own weight."""
    seen: list[torch.Tensor] = []

    def summed(given: MicroBatch, rows_R: torch.Tensor, hidden_RH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
        seen.append(torch.stack([*policy._logprob_and_entropy(given, rows_R, hidden_RH), policy._value_R(given, rows_R, hidden_RH)]))
        last = sum(part.shape[1] for part in seen)
        weight_R = torch.arange(last - seen[-1].shape[1] + 1.0, last + 1, device=hidden_RH.device)
        weight_3R = torch.stack([weight_R, 3 * weight_R, 7 * weight_R]).cos()
        return (seen[-1] * weight_3R).sum(), hidden_RH.new_full((), int(len(seen) == 1), dtype=torch.int), {}

    with megatron_on_cpu():
        for chunk in policy.network.model:
            chunk.zero_grad_buffer()
        policy.network.pipeline.run(list(batches), summed, forward_only=False)
    trained = ((name, parameter) for name, parameter in policy.network.chunks.named_parameters() if parameter.requires_grad)
    return torch.cat(seen, 1).detach(), {name: parameter.main_grad.clone() for name, parameter in trained}


def compared(policy: Policy, renderer: Renderer) -> Callable[[list[list[str]]], None]:
    shown = {
        name: renderer.prompt([user_message("", make_picture(*given))]).images[0]
        for name, given in (("a", (1, 112, 56)), ("b", (2, 56, 56)))
    }
    how = {"image_token_id": renderer.image_token_id, "positions": policy.spec.rope_positions, "device": policy.network.device}

    def compare(trees: list[list[str]]) -> None:
        contexts = [grown(["1", *parts, "x"], shown, renderer) for parts in trees]
        loads = pack_costs([PackItem(each) for each in contexts], renderer.image_token_id, share_prompts=True)
        ordered = [load.item for load in loads]
        shared, whole = (pack(ordered, **how, share_prompts=share) for share in (True, False))
        assert shared.num_tokens == loads[0].num_tokens_alone + sum(load.num_added_tokens for load in loads[1:]) <= whole.num_tokens
        (ours, gradients), (theirs, expected) = said(policy, shared), said(policy, whole)
        assert (ours - theirs).abs().max() <= 1e-5
        scale = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
        worst = max(((gradient - expected[name]).norm() / scale).item() for name, gradient in gradients.items())
        assert worst <= 1e-5

    return compare


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_random_trees(random_model: Path, lora: LoraSettings | None) -> None:
    """Logprobs, entropies, values and all gradients equal those without shared prefixes.

    Images occur anywhere, and some sequences diverge in the middle of a response.
    """
    with single_process_world():
        policy, renderer = make_policy_and_renderer(random_model, OptimSettings(), lora=lora, critic=CriticSettings(head_sizes=[8]))
        with torch.no_grad():
            for seed, (name, parameter) in zip(count(), policy.network.chunks.named_parameters(), strict=False):
                if is_adapter(name):
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
        compare = compared(policy, renderer)
        compare([list("a12x1y1"), list("a12x2b"), list("a12x1"), list("ab1x"), list("a12x1y12x")])
        settings(max_examples=12, deadline=None)(given(TREES)(compare))()


def test_a_chain_of_turns_in_several_micro_batches(random_model: Path) -> None:
    """A chain of fifty sequences, each with one turn more than the previous one, gives the same
    results in one micro-batch and in several. The chain is split where the number of keys becomes
    too large; the gradients of the parts add up to the gradient of the whole."""
    with single_process_world():
        policy, renderer = make_policy_and_renderer(random_model, OptimSettings(), critic=CriticSettings(head_sizes=[8]))
        contexts = []
        for turn in range(1, 51):
            contexts.append(TokenSequence())
            contexts[-1].extend(list(range(100, 98 + 3 * turn)))
            contexts[-1].extend([98 + 3 * turn, 99 + 3 * turn], logprobs=[-1.0, -1.0])
        loads = pack_costs([PackItem(each) for each in contexts], renderer.image_token_id, share_prompts=True)
        how = {"image_token_id": renderer.image_token_id, "positions": policy.spec.rope_positions, "device": policy.network.device}
        (whole,), parts = ([pack(part, **how, share_prompts=True) for part in split_by_cost(loads, room)] for room in (150 * 50, 150))
        assert whole.num_tokens == 150 and 3 <= len(parts) <= 8 and all(part.num_tokens <= 150 for part in parts)
        (ours, gradients), (theirs, expected) = said(policy, *parts), said(policy, whole)
        assert ours.shape == (3, 100) and (ours - theirs).abs().max() <= 1e-5
        scale = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
        assert max(((gradient - expected[name]).norm() / scale).item() for name, gradient in gradients.items()) <= 1e-5
