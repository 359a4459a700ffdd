"""The gated delta rule and the convolution over trees of segments, against one token at a time in
float64.
"""

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import conv1d, silu

from megatron_rl.policy import delta_rule
from megatron_rl.policy.delta_rule import causal_convolution, gated_delta_rule, plan_chunks

OFFSETS, PREFIXES = [0, 5, 12, 12, 30, 33, 163], [-1, 0, 1, 1, 0, -1]
"""A prefix of 5 tokens with two branches, one of which branches again and has an empty branch, and
a sequence of 130 tokens without a prefix.
"""
KEY_HEADS, RATIO, KEY_DIM, VALUE_DIM, KERNEL = 2, 3, 4, 5, 4


def run_recurrence(inputs: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of the tokens of one segment, and the state after them."""
    outputs = []
    for q, k, v, log_decay, rate in zip(*inputs, strict=True):
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        state = state * log_decay.exp()[..., None, None]
        predicted = torch.einsum("krde,kd->kre", state, k)
        state = state + torch.einsum("kd,kre->krde", k, (v - predicted) * rate[..., None])
        outputs.append(torch.einsum("krde,kd->kre", state, q) / KEY_DIM**0.5)
    return torch.stack(outputs), state


def expected_outputs(inputs: list[torch.Tensor]) -> torch.Tensor:
    """Return the outputs of all segments; a segment starts with the last state of its prefix."""
    outputs, states = [], []
    for (start, stop), prefix in zip(pairwise(OFFSETS), PREFIXES, strict=True):
        state = torch.zeros(KEY_HEADS, RATIO, KEY_DIM, VALUE_DIM, dtype=torch.float64) if prefix < 0 else states[prefix]
        if stop > start:
            output, state = run_recurrence([x[start:stop] for x in inputs], state)
            outputs.append(output)
        states.append(state)
    return torch.cat(outputs)


def make_inputs() -> list[torch.Tensor]:
    """Return queries, keys, values, decays and rates in float64; keys have different norms."""
    generator = torch.Generator().manual_seed(0)
    heads, rest = (OFFSETS[-1], KEY_HEADS), {"generator": generator, "dtype": torch.float64}
    vectors = [torch.randn(*heads, KEY_DIM, **rest) for _ in range(2)] + [torch.randn(*heads, RATIO, VALUE_DIM, **rest)]
    return [*vectors, -0.3 * torch.rand(*heads, RATIO, **rest), torch.rand(*heads, RATIO, **rest)]


@pytest.mark.known_failure("packed-linear-attention")
@pytest.mark.parametrize("size", [4, 64])
def test_outputs_and_gradients_are_those_of_one_token_at_a_time(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments, shared prefixes and chunks do not change outputs or gradients: a state is reset at
    the start of a sequence and handed to every branch of a prefix.
    """
    monkeypatch.setattr(delta_rule, "CHUNK_SIZES", (size,))
    exact = [x.requires_grad_() for x in make_inputs()]
    rounded = [x.detach().float().requires_grad_() for x in exact]
    expected, found = expected_outputs(exact), gated_delta_rule(*rounded, plan_chunks(OFFSETS, PREFIXES, KERNEL))
    assert found.dtype == torch.float32 and (found - expected).norm() <= 1e-6 * expected.norm()
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    theirs, ours = torch.autograd.grad(expected, exact, gradient), torch.autograd.grad(found, rounded, gradient.float())
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).norm() <= 1e-6 * other.norm()


def test_a_strong_decay_does_not_overflow() -> None:
    """A decay to exp(-100) with every token gives finite outputs and gradients."""
    inputs = [x.float() for x in make_inputs()]
    inputs[3] = torch.full_like(inputs[3], -100.0)
    inputs = [x.requires_grad_() for x in inputs]
    out = gated_delta_rule(*inputs, plan_chunks(OFFSETS, PREFIXES, KERNEL))
    assert all(x.isfinite().all() for x in (out, *torch.autograd.grad(out.sum(), inputs)))


@pytest.mark.known_failure("packed-linear-attention")
@pytest.mark.parametrize("kernel", [2, 4])
def test_the_convolution_reads_the_prefix_and_no_other_sequence(kernel: int) -> None:
    """Outputs and gradients equal those of torch's convolution over each path of the tree."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).requires_grad_() for shape in ((OFFSETS[-1], 6), (6, kernel)))
    outputs, paths = [], []
    for (start, stop), prefix in zip(pairwise(OFFSETS), PREFIXES, strict=True):
        paths.append(([] if prefix < 0 else paths[prefix]) + list(range(start, stop)))
        whole = silu(conv1d(x[paths[-1]].t(), weight[:, None], padding=kernel - 1, groups=6))[:, : len(paths[-1])].t()
        outputs.append(whole[len(paths[-1]) - (stop - start) :])
    found, expected = causal_convolution(x, weight, plan_chunks(OFFSETS, PREFIXES, kernel)), torch.cat(outputs)
    assert (found - expected).abs().max() <= 1e-5
    gradient = torch.randn(expected.shape, generator=generator)
    ours, theirs = (torch.autograd.grad(result, (x, weight), gradient) for result in (found, expected))
    assert all((one - other).norm() <= 1e-5 * other.norm() for one, other in zip(ours, theirs, strict=True))


def test_a_prefix_is_computed_once() -> None:
    """Each token is in exactly one chunk, and there are no more waves than chunks on a path. Chunks
    of 64 tokens would need 448 rows for 163 tokens, and those of 32 tokens 320.
    """
    plan = plan_chunks(OFFSETS, PREFIXES, KERNEL)
    assert sorted(plan.row_NC[plan.row_NC < OFFSETS[-1]].tolist()) == list(range(OFFSETS[-1]))
    assert torch.equal(plan.row_NC.flatten()[plan.slot_T], torch.arange(OFFSETS[-1]))
    assert plan.row_NC.shape == (14, 16) and plan.wave_sizes == [2, 3, 2, 2, 1, 1, 1, 1, 1]
    assert plan_chunks([0, 163], None, KERNEL).row_NC.shape == (3, 64)
