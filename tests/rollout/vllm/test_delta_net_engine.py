"""The CPU kernel of vLLM's gated delta nets against the trainer's chunked computation."""

import torch

from megatron_rl.policy.delta_rule import causal_convolution, gated_delta_rule, plan_chunks
from megatron_rl.rollout.vllm.delta_net_engine import convolve, normalize_heads, run_delta_rule

KERNEL, HEADS, KEY_DIM, VALUE_DIM = 4, 3, 4, 5


def test_steps_of_the_engine_continue_each_other() -> None:
    """Tokens of three sequences computed in two steps, with one token or several in each, have the
    outputs of one computation of the whole sequences.
    """
    generator = torch.Generator().manual_seed(0)
    offsets = [0, 7, 8, 20]
    plan, total = plan_chunks(offsets, None, KERNEL), offsets[-1]
    x, weight = torch.randn(total, 6, generator=generator), torch.randn(6, KERNEL, generator=generator)
    q, k = (torch.randn(total, HEADS, KEY_DIM, generator=generator) for _ in range(2))
    v = torch.randn(total, HEADS, VALUE_DIM, generator=generator)
    log_decay, rate = -torch.rand(total, HEADS, generator=generator), torch.rand(total, HEADS, generator=generator)
    convolved = causal_convolution(x, weight, plan)
    expected = gated_delta_rule(q, k, v[:, :, None], log_decay[..., None], rate[..., None], plan)[:, :, 0]
    last, state = torch.zeros(3, KERNEL - 1, 6), torch.zeros(3, HEADS, VALUE_DIM, KEY_DIM)
    for sequences, step in (((0, 1, 2), [(0, 6), (7, 8), (8, 10)]), ((0, 2), [(6, 7), (10, 20)])):
        rows = torch.cat([torch.arange(start, stop) for start, stop in step])
        offset = torch.tensor([0, *(stop - start for start, stop in step)]).cumsum(0)
        chosen = torch.tensor(sequences)
        found, last[chosen] = convolve(x[rows], weight, offset, last[chosen])
        assert (found - convolved[rows]).abs().max() <= 1e-5
        states = state[chosen]
        queries, keys = normalize_heads(q[rows]) * KEY_DIM**-0.5, normalize_heads(k[rows])
        out = run_delta_rule(queries, keys, v[rows], log_decay[rows].exp(), rate[rows], offset, states)
        state[chosen] = states
        assert (out - expected[rows]).abs().max() <= 1e-5
