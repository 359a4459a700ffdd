"""Runs a script, or with -m a module, where torch is older than the one that is pinned.

    python benchmarks/gpu/older_torch.py benchmarks/mfu.py --model .gpu/7B
    python benchmarks/gpu/older_torch.py -m pytest tests/gpu

torch 2.11's variable-length attention has no argument enable_gqa (torch/nn/attention/varlen.py; 2.13 has it); the kernel behind it takes
fewer key/value heads than query heads without being told. The argument is left out for it, and nothing is changed where it is known.
"""

import inspect
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.attention import varlen


def understood(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The kernel, callable with enable_gqa."""
    if "enable_gqa" in inspect.signature(kernel).parameters:
        return kernel

    def call(*given: object, enable_gqa: bool = False, **named: object) -> torch.Tensor:
        return kernel(*given, **named)

    return call


def main(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return
    varlen.varlen_attn = understood(varlen.varlen_attn)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
