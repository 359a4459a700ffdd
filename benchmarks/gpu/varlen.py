"""Error and speed of the policy's attention (policy/attention.py) on this device.

    # torch's default variable-length kernel:
    python benchmarks/gpu/varlen.py
    # With another kernel:
    python benchmarks/gpu/varlen.py --implementation FA3
    # Smoke test; on a CPU, it tests the dense attention:
    python benchmarks/gpu/varlen.py --tiny

The script first checks that the kernel aligns causal masks to the last key, as shared prompts
require (require_prefix_attention). If the check fails, the script exits. Errors are the relative
errors of the output and of the three gradients in bfloat16, compared with dense attention in
float64 on the CPU; tests/gpu requires relative errors of at most 1e-2. Speed is measured with a
causal mask, 28 query heads and 4 key/value heads of size 128. FLOPs are counted for the (query,
key) pairs that the mask allows: 4 * heads * head_dim per pair in the forward pass, and 2.5 times as
many in the backward pass.
"""

import argparse
from itertools import pairwise

import torch
from gauges import device, distance, machine, print_head, print_row, timed

from megatron_rl.policy.attention import Segments, has_varlen_kernel, packed_attention, require_prefix_attention, varlen_attention

BOUND = 1e-2
HEAD_SIZES = (32, 80, 128)
"""Head sizes of the nano model, of the vision tower, and of all released language models."""
CASES = {
    "apart": ([0, 70, 71, 200], [-1, -1, -1], True),
    "windows": ([0, 64, 128, 200], [-1, -1, -1], False),
    "shared prompt": ([0, 300, 340, 400], [-1, 0, 0], True),
}
"""Maps a case's name to segment offsets, indices of the prefix segments (or -1), and `causal`."""


def errors(head_size: int, offsets: list[int], prefix_S: list[int], *, causal: bool) -> list[float]:
    """Return the relative errors of the output and the gradients of q, k and v."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(offsets[-1], heads, head_size, generator=generator).bfloat16() for heads in (8, 2, 2)]
    weight = torch.randn(offsets[-1], 8, head_size, generator=generator, dtype=torch.float64)
    results = []
    for where, dtype in ((device(), torch.bfloat16), (torch.device("cpu"), torch.float64)):
        q, k, v = (x.to(where, dtype).requires_grad_() for x in inputs)
        out = packed_attention(q, k, v, Segments(offsets, prefix_S, device=where), causal=causal, scale=head_size**-0.5)
        gradients = torch.autograd.grad((out * weight.to(where, dtype)).sum(), (q, k, v))
        results.append([out, *gradients])
    return distance(*results)


def pairs(offsets: list[int], prefix_S: list[int]) -> int:
    """Return the number of (query, key) pairs under the causal mask.

    Example: ([0, 2, 5], [-1, 0]) has 3 + (2 * 3 + 6) = 15 pairs.
    """
    lengths = [stop - start for start, stop in pairwise(offsets)]
    before = [lengths[prefix] if prefix >= 0 else 0 for prefix in prefix_S]
    return sum(first * length + length * (length + 1) // 2 for first, length in zip(before, lengths, strict=True))


def speed(offsets: list[int], prefix_S: list[int], *, heads: tuple[int, int], head_size: int) -> tuple[float, float]:
    """Return the TFLOP/s of forward and backward pass: the best of three rounds after a warm-up."""
    q, k, v = (
        torch.randn(offsets[-1], num, head_size, device=device(), dtype=torch.bfloat16).requires_grad_() for num in (*heads, heads[1])
    )
    segments, work = Segments(offsets, prefix_S, device=device()), 4 * heads[0] * head_size * pairs(offsets, prefix_S) / 1e12
    rounds = []
    for _ in range(4):
        forward, out = timed(lambda: packed_attention(q, k, v, segments, causal=True, scale=head_size**-0.5))
        ones = torch.ones_like(out)
        backward, _ = timed(lambda out=out, ones=ones: torch.autograd.grad(out, (q, k, v), ones))
        rounds.append((forward, backward))
    forward, backward = (min(column) for column in zip(*rounds[1:], strict=True))
    return work / forward, 2.5 * work / backward


def sizes(*, tiny: bool) -> dict[str, tuple[list[int], list[int]]]:
    """Return the timed cases, which have 32,768 tokens each, or 64 tokens if `tiny`."""
    scale = 512 if tiny else 1
    tokens, prompt, reply = 32768 // scale, 8192 // scale, 2048 // scale
    apart = {length // scale: list(range(0, tokens + 1, length // scale)) for length in (2048, 8192)}
    shared = [0, *range(prompt, tokens + 1, reply)]
    found = {f"sequences of {length}": (offsets, [-1] * (len(offsets) - 1)) for length, offsets in apart.items()}
    return found | {f"{len(shared) - 2} responses of {reply} to a prompt of {prompt}": (shared, [-1] + [0] * (len(shared) - 2))}


def main() -> None:
    """Run the benchmark and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--implementation", default="", help="implementation for torch.nn.attention.activate_flash_attention_impl, such as FA3"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="smoke test: measure the speed with 64 tokens, 4 query heads and 2 key/value heads of size 32"
    )
    given = parser.parse_args()
    if given.implementation:
        torch.nn.attention.activate_flash_attention_impl(given.implementation)
    with_kernel = has_varlen_kernel(device(), torch.bfloat16)
    print(f"{machine()}, {f'kernel {given.implementation}' if with_kernel else 'dense'}")
    if with_kernel:
        require_prefix_attention(varlen_attention, device(), torch.bfloat16)
    print_head("head size", "segments", "output", "dq", "dk", "dv", f"below {BOUND:g}")
    for head_size in HEAD_SIZES:
        for name, (offsets, prefix_S, causal) in CASES.items():
            found = errors(head_size, offsets, prefix_S, causal=causal)
            print_row(head_size, name, *(f"{error:.1e}" for error in found), "yes" if max(found) < BOUND else "NO")
    print_head("timed", "forward TFLOP/s", "backward TFLOP/s")
    for name, (offsets, prefix_S) in sizes(tiny=given.tiny).items():
        found = speed(offsets, prefix_S, heads=(4, 2) if given.tiny else (28, 4), head_size=32 if given.tiny else 128)
        print_row(name, *(f"{rate:.3g}" for rate in found))


if __name__ == "__main__":
    main()
