"""Speed of the backward pass of SwiGLU: Megatron-Core's, this project's, and a copy of the bytes.

    python benchmarks/gpu/swiglu.py
    # Smoke test; also runs on a CPU:
    python benchmarks/gpu/swiglu.py --tiny

The default sizes are those of a micro-batch of 16,384 tokens in Qwen2.5-VL-3B. The backward pass
reads the input and the gradient of the output, and writes the gradient of the input: 5 values for
each value of the output. The row "copy" copies a tensor that moves the same number of bytes, which
is the bound for an elementwise kernel.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from gauges import device, distance, machine, print_head, print_row, timed
from megatron.core.fusions.fused_bias_swiglu import swiglu_back

from megatron_rl.policy.fused import swiglu_gradient

REPEATS = 20
VALUES = 5
"""Values that the backward pass reads and writes for each value of the output."""


def seconds(act: Callable[[], object]) -> float:
    """Return the mean duration of a call, after three calls for compilation and warm-up."""
    for _ in range(3):
        act()
    return timed(lambda: [act() for _ in range(REPEATS)])[0] / REPEATS


def exact(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of SwiGLU by autograd in float64."""
    given = x.double().requires_grad_()
    gate, up = given.chunk(2, -1)
    return torch.autograd.grad(torch.nn.functional.silu(gate) * up, given, grad.double())[0]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--width", type=int, default=11008, help="columns of the MLP's output")
    parser.add_argument("--tiny", action="store_true", help="smoke test with the smallest sizes")
    given = parser.parse_args()
    tokens, width = (64, 48) if given.tiny else (given.tokens, given.width)
    x = torch.randn(tokens, 2 * width, device=device(), dtype=torch.bfloat16)
    grad = torch.randn(tokens, width, device=device(), dtype=torch.bfloat16)
    buffer = torch.empty(tokens * width * VALUES // 2, device=device(), dtype=torch.bfloat16)
    print(machine())
    print_head("kernel", "ms", "TB/s", "relative error")
    truth = exact(grad[:256], x[:256])
    kernels = {"Megatron-Core": partial(swiglu_back, grad, x), "this project": partial(swiglu_gradient, grad, x)}
    for name, kernel in {**kernels, "copy": buffer.clone}.items():
        duration = seconds(kernel)
        error = f"{distance([kernel()[:256]], [truth])[0]:.1e}" if name in kernels else "-"
        print_row(name, f"{1e3 * duration:.3f}", f"{2 * VALUES * tokens * width / duration / 1e12:.2f}", error)


if __name__ == "__main__":
    main()
