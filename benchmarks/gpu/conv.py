"""Patch embedding of the vision tower in bfloat16: a convolution compared with a matrix product.

    # 1,024 to 160,000 patches, from a few images to a full micro-batch:
    python benchmarks/gpu/conv.py
    # Smoke test; also runs on a CPU:
    python benchmarks/gpu/conv.py --tiny

The convolution is the implementation in transformers; the matrix product is the implementation in
this trainer (policy/vision.py). Forward and backward pass are timed separately, after a warm-up.
The column "peak MB" contains the memory that torch allocates beyond the patches and the weight ("-"
on a CPU). The error columns contain the relative differences of output and gradient from those of
the matrix product. If a variant takes more than --patience seconds, larger sizes of this variant
are skipped.
"""

import argparse

import torch
from gauges import device, distance, machine, print_head, print_row, timed
from torch import nn

from megatron_rl.policy.vision import LinearPatchEmbed

CHANNELS, KERNEL = 3, (2, 14, 14)
WIDTH = 1280
"""Hidden size of the vision tower in all released Qwen2.5-VL models."""


def embeddings(width: int) -> dict[str, nn.Conv3d]:
    """Return two patch embeddings with equal weights; the first is the reference for errors."""
    given = {"kernel_size": KERNEL, "stride": KERNEL, "bias": False, "device": device(), "dtype": torch.bfloat16}
    product, conv = LinearPatchEmbed(CHANNELS, width, **given), nn.Conv3d(CHANNELS, width, **given)
    conv.load_state_dict(product.state_dict())
    return {"product": product, "conv3d": conv}


def once(embedding: nn.Conv3d, patches: torch.Tensor) -> tuple[float, float, list[torch.Tensor]]:
    """Return the seconds of forward and backward pass, and the output and the weight's gradient."""
    forward, out = timed(lambda: embedding(patches))
    ones = torch.ones_like(out)
    backward, gradients = timed(lambda: torch.autograd.grad(out, embedding.weight, ones))
    return forward, backward, [out, *gradients]


def measured(embedding: nn.Conv3d, patches: torch.Tensor) -> tuple[float, float, str, list[torch.Tensor]]:
    """Run `once` twice and return the results and the peak memory in MB of the second run."""
    once(embedding, patches)
    if not patches.is_cuda:
        forward, backward, made = once(embedding, patches)
        return forward, backward, "-", made
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    forward, backward, made = once(embedding, patches)
    return forward, backward, f"{(torch.cuda.max_memory_allocated() - before) / 1e6:.0f}", made


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patches", type=int, nargs="+", default=[1024, 10_000, 40_000, 160_000])
    parser.add_argument(
        "--patience", type=float, default=10.0, help="skip larger sizes of a variant after a round that takes longer than this"
    )
    parser.add_argument("--tiny", action="store_true", help="smoke test: 16 and 32 patches, width 64")
    given = parser.parse_args()
    slow: set[str] = set()
    print(machine())
    print_head("patches", "how", "forward ms", "backward ms", "peak MB", "output error", "gradient error")
    for num in [16, 32] if given.tiny else given.patches:
        patches, truth = torch.randn(num, CHANNELS, *KERNEL, device=device(), dtype=torch.bfloat16), []
        for name, embedding in embeddings(64 if given.tiny else WIDTH).items():
            if name in slow:
                print_row(num, name, *["not measured"] * 5)
                continue
            try:
                forward, backward, peak, made = measured(embedding, patches)
            except RuntimeError as error:  # a cuDNN or out-of-memory error is a valid result
                print_row(num, name, f"{type(error).__name__}: {str(error).splitlines()[0][:80]}", *["-"] * 4)
                continue
            truth = truth or [numbers.flatten(1) for numbers in made]
            off = distance([numbers.flatten(1) for numbers in made], truth)
            print_row(num, name, f"{1e3 * forward:.2f}", f"{1e3 * backward:.2f}", peak, *(f"{each:.1e}" for each in off))
            if forward + backward > given.patience:
                slow.add(name)


if __name__ == "__main__":
    main()
