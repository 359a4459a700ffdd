"""Runs Megatron-Core 0.16.1 on a CPU; `megatron_on_cpu` does nothing if CUDA is available.

Megatron queries torch.cuda for the current device, random states and streams, and allocates tensors
with device="cuda". Megatron also compares type strings such as `torch.cuda.FloatTensor`
(optimizer/distrib_optimizer.py, optimizer/clip_grads.py). `megatron_on_cpu()` patches these calls
while one method of the policy runs and restores them afterwards. If the patches stayed active,
their TorchFunctionMode would slow down an engine in the same process by 13 to 29 percent, and
`Tensor.type` would return wrong strings.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch.overrides import TorchFunctionMode

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _RedirectCudaDevice(TorchFunctionMode):
    """Creates CUDA tensors on `device`, ignores `.cuda()` and reports CUDA type strings."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204 (signature fixed by torch)
        if kwargs and kwargs.get("device") is not None and str(kwargs["device"]).startswith("cuda"):
            kwargs = {**kwargs, "device": self.device}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.meta.", "torch.").replace("torch.", "torch.cuda.")
        return func(*args, **(kwargs or {}))


def _cuda_patches(device: torch.device) -> list[tuple[object, str, object]]:
    from megatron.core.tensor_parallel import random

    def get_state(*_: object, **__: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_: object, **__: object) -> None:
        torch.set_rng_state(state)

    return [
        (torch.cuda, "current_device", lambda: device),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", get_state),
        (torch.cuda, "set_rng_state", set_state),
        (random, "_get_cuda_rng_state", get_state),
        (random, "_set_cuda_rng_state", set_state),
    ]


@contextmanager
def _patched_cuda(device: torch.device) -> Iterator[None]:
    from megatron.core.tensor_parallel import random

    # Megatron's RNG tracker warns at every draw that the CPU generator's state changed. The change
    # is expected here, because the CPU generator replaces the device generator.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    answers = _cuda_patches(device)
    originals = [getattr(owner, name) for owner, name, _ in answers]
    for owner, name, answer in answers:
        setattr(owner, name, answer)
    try:
        with _RedirectCudaDevice(device):
            yield
    finally:
        for (owner, name, _), original in zip(answers, originals, strict=True):
            setattr(owner, name, original)


def megatron_on_cpu():  # noqa: ANN201
    """Return a context manager that lets Megatron run on the CPU if CUDA is unavailable."""
    return nullcontext() if torch.cuda.is_available() else _patched_cuda(torch.device("cpu"))


@contextmanager
def megatron_on_meta_device() -> Iterator[None]:
    """Make Megatron allocate its tensors on the meta device inside the `with` block.

    Tensors on the meta device have sizes but no data.
    """
    meta = torch.device("meta")
    with _patched_cuda(meta), meta:
        yield


def with_megatron_on_cpu(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function that calls Megatron, so that it runs inside `megatron_on_cpu()`."""

    @wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with megatron_on_cpu():
            return function(*args, **kwargs)

    return run
