"""Runs a script, or a module with -m, under a torch version older than the pinned version.

    python benchmarks/gpu/older_torch.py benchmarks/mfu.py --model .gpu/7B
    python benchmarks/gpu/older_torch.py -m pytest tests/gpu

In torch 2.11, the variable-length attention does not have the argument enable_gqa of torch 2.13
(torch/nn/attention/varlen.py). The kernel of torch 2.11 supports fewer key/value heads than query
heads even without this argument, so the argument is dropped. If the installed torch version has the
argument, nothing is changed.

In torch 2.11, a concatenation of up to eight tensors is always compiled to one loop with masked
loads. The option max_complex_pointwise_cat_inputs of torch 2.13 is emulated: it is removed from the
options of torch.compile, and the limit of eight is lowered to zero if max_pointwise_cat_inputs is
0.
"""

import argparse
import inspect
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch._inductor
from torch._inductor import config, lowering
from torch.nn.attention import varlen


def understood(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the attention kernel with a signature that accepts enable_gqa."""
    if "enable_gqa" in inspect.signature(kernel).parameters:
        return kernel

    def call(*given: object, enable_gqa: bool = False, **named: object) -> torch.Tensor:
        return kernel(*given, **named)

    return call


def accept_cat_options() -> None:
    """Give torch.compile the option max_complex_pointwise_cat_inputs if it lacks it."""
    if "max_complex_pointwise_cat_inputs" in torch._inductor.list_options():
        return
    compiled, cat = torch.compile, inspect.unwrap(lowering.lowerings[torch.ops.aten.cat.default])
    masked = cat.__code__
    separate = masked.replace(co_consts=tuple(0 if value == 8 else value for value in masked.co_consts))
    lowered = lowering.lowerings[torch.ops.aten.cat.default]

    def lower_cat(*given: object, **named: object) -> object:
        cat.__code__ = masked if config.max_pointwise_cat_inputs else separate
        return lowered(*given, **named)

    def compile_with(*given: object, options: dict[str, object] | None = None, **named: object) -> object:
        kept = {key: value for key, value in (options or {}).items() if key != "max_complex_pointwise_cat_inputs"}
        return compiled(*given, options=kept or None, **named)

    lowering.lowerings[torch.ops.aten.cat.default] = lowering.lowerings[torch.ops.aten.cat] = lower_cat
    torch.compile = compile_with


def main(arguments: list[str] | None = None) -> None:
    """Run the script or module with the adapted kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", action="store_true", help="run a module instead of a script")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="script or module, and its arguments")
    given = parser.parse_args(arguments)
    if not given.words:
        parser.error("no script or module given")
    varlen.varlen_attn = understood(varlen.varlen_attn)
    accept_cat_options()
    sys.argv = given.words
    if given.m:
        runpy.run_module(given.words[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(given.words[0]).resolve().parent)
        runpy.run_path(given.words[0], run_name="__main__")


if __name__ == "__main__":
    main()
