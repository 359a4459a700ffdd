"""The measuring mode of the full-size runs (tests/support/full_size/fake_device.py) against waits
and bytes counted by hand, on small FakeTensors."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from tests.support.full_size.fake_device import FakeGpu


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    made = FakeGpu()
    with FakeTensorMode(allow_non_fake_inputs=True), made:
        yield made


@pytest.mark.parametrize(
    ("expected", "compute"),
    [
        ("item", lambda x: float(x.sum())),
        ("nonzero", lambda x: x.nonzero()),
        ("nonzero of a mask", lambda x: x[x > 0]),
        ("index on the host", lambda x: x[torch.tensor([1, 2])]),
        ("copy to host", lambda x: x.cpu()),
        ("copy to device from unpinned memory", lambda x: torch.ones(4).to(x.device, non_blocking=True)),
        ("copy to device", lambda x: torch.ones(4).pin_memory().to(x.device)),
        ("", lambda x: torch.ones(4).pin_memory().to(x.device, non_blocking=True)),
        ("", lambda x: torch.empty(4, pin_memory=True).copy_(x, non_blocking=True)),
        ("", lambda x: x.masked_fill(x > 1, 0.0).softmax(0)[1:3]),
        ("", lambda x: x.__setitem__(x > 1, 0.0)),
    ],
)
def test_waits_are_counted(expected: str, compute: Callable[[torch.Tensor], object], gpu: FakeGpu) -> None:
    x = torch.empty(4, device="cuda")
    with suppress(DynamicOutputShapeException):  # the size of the result is unknown; the wait was counted before
        compute(x)
    assert Counter(place.split(" < ")[0] for place in gpu.waits.elements()) == Counter([expected] if expected else [])


def test_mixed_devices_raise(gpu: FakeGpu) -> None:
    with pytest.raises(RuntimeError, match="cpu"):
        torch.empty(4, device="cuda") + torch.ones(4)


def test_bytes_are_counted_in_blocks(gpu: FakeGpu) -> None:
    """1,000 floats take 4,096 bytes until their last view is gone; one float takes 512."""
    x = torch.empty(1000, device="cuda")
    view, host = x[10:], torch.empty(1000)
    assert gpu.live == 4096 and view.is_cuda and not host.is_cuda
    del x
    y = torch.empty(1, device="cuda")
    assert gpu.live == gpu.peak == 4096 + 512
    del view
    assert gpu.live == 512 and gpu.peak == 4096 + 512
    gpu.reset_peak()
    assert gpu.peak == 512 and y.is_cuda
