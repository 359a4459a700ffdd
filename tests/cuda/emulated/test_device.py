"""The emulated device and its attention kernel: errors, waits, memory and numbers."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from megatron_rl.policy.attention import Segments, packed_attention
from tests.support.cuda import device, flash_attention

OFFSETS = [0, 70, 71, 200]


def test_operators_that_mix_devices_raise() -> None:
    """An index may be on the host and costs a wait; all other operands must be on one device."""
    first, second, host = torch.ones(4, device="cuda:0"), torch.ones(4, device="cuda:1"), torch.ones(4)
    for theirs, where in ((host, "cpu"), (second, "cuda:1")):
        for compute in (torch.add, torch.dot, lambda a, b: torch.where(a > 0, a, b), lambda a, b: torch.cat([a, b])):
            with pytest.raises(RuntimeError, match=f"found at least two devices, cuda:0 and {where}"):
                compute(first, theirs)
    with pytest.raises(RuntimeError, match="found at least two devices"):
        first.index_select(0, torch.tensor([0]))
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device="cuda:8")
    assert (first + torch.tensor(1.0)).tolist() == [2.0] * 4


@pytest.mark.parametrize(
    ("operation", "compute"),
    [
        ("item", lambda x: x.sum().item()),
        ("item", lambda x: bool((x > 0).all())),
        ("nonzero", lambda x: x.nonzero()),
        ("masked_select", lambda x: x.masked_select(x > 1)),
        ("equal", lambda x: torch.equal(x, x)),
        ("repeat_interleave", lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.long).pin_memory().to(x.device, non_blocking=True))),
        ("copy to device from unpinned memory", lambda x: x[torch.tensor([1, 2])]),
        ("nonzero", lambda x: x[x > 0]),
        ("index by a mask", lambda x: x.index_put_((x > 0,), x)),
        ("", lambda x: x.index_put_((x > 0,), x[:1])),
        ("copy to host", lambda x: x.cpu()),
        ("copy to host", lambda x: x.tolist()),
        ("copy to device from unpinned memory", lambda x: torch.ones(4).to(x.device, non_blocking=True)),
        ("copy to device", lambda x: torch.ones(4).pin_memory().to(x.device)),
        ("", lambda x: torch.ones(4).pin_memory().to(x.device, non_blocking=True)),
        ("", lambda x: torch.empty(4, pin_memory=True).copy_(x, non_blocking=True)),
        ("", lambda x: x.masked_fill(x > 1, 0.0).softmax(0)[1:3].index_copy(0, x[:1].long() - 1, x[:1])),
        ("synchronize device", lambda x: torch.cuda.synchronize()),
    ],
)
def test_waits_are_counted_once(operation: str, compute: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(4, device="cuda")
    device.waits.clear()
    compute(x)
    assert Counter(place.split(" < ")[0] for place in device.waits.elements()) == Counter([operation] if operation else [])


def test_memory_is_counted_in_blocks_of_512_bytes() -> None:
    """Live and peak bytes follow allocations; views and pinned memory take none."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    x = torch.empty(1000, device="cuda")
    view, host = x[10:].view(-1, 10), torch.empty(1000, pin_memory=True)
    assert torch.cuda.memory_allocated() - before == 4096 and view.is_cuda and host.is_pinned()
    del x
    y = torch.empty(1, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4096 + 512
    del view, y
    assert torch.cuda.memory_allocated() == before and torch.cuda.max_memory_allocated() - before == 4096 + 512


@pytest.mark.parametrize(("causal", "prefix_S"), [(True, None), (False, None), (True, [-1, 0, 0])])
def test_attention_equals_autograd(causal: bool, prefix_S: list[int] | None) -> None:
    """Outputs and gradients of the kernel equal those of float64 attention and its autograd, up to
    the rounding of bfloat16 outputs."""
    inputs, found = [torch.randn(200, heads, 32).bfloat16() for heads in (4, 2, 2)], []
    for where, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float64)):
        q, k, v = (x.to(where, dtype).requires_grad_() for x in inputs)
        out = packed_attention(q, k, v, Segments(OFFSETS, prefix_S, device=q.device), causal=causal, scale=0.3)
        found.append([x.detach().double().cpu() for x in (out, *torch.autograd.grad(out.double().square().sum(), (q, k, v)))])
    assert all((ours - truth).norm() <= 1e-2 * truth.norm() for ours, truth in zip(*found, strict=True))
    assert not flash_attention.skipped_calls


def kernel_inputs(**changes: object) -> tuple:
    offsets = torch.tensor(OFFSETS, dtype=torch.int32, device="cuda")
    given = {"q": (200, 4, 32), "k": (200, 2, 32), "v": (200, 2, 32)}
    inputs = {name: torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for name, shape in given.items()}
    made = {**inputs, "cu_q": offsets, "cu_k": offsets, "max_q": 129, "max_k": 129, **changes}
    return tuple(made.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.float32}, "only float16 and bfloat16"),
        ({"k": torch.float16}, "query, key and value have dtypes"),
        ({"cu_q": torch.int64}, "cu_seqlens_q must have dtype int32"),
        ({"cu_k": "cpu"}, "cu_seqlens_k is on cpu"),
        ({"cu_k": "cuda:1"}, "cu_seqlens_k is on cuda:1"),
        ({"v": "cuda:2"}, "value is on cuda:2"),
        ({"max_q": 128}, "a segment has 129 tokens"),
        ({"cu_q": lambda x: x - 1}, "do not increase from 0"),
        ({"cu_k": lambda x: x.clamp(max=199)}, "offsets end with 199"),
        ({"q": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)}, "the last one contiguous"),
        ({"q": lambda x: x.flatten()[4:-28].view(-1, 4, 8)}, "not aligned to 16 bytes"),
        ({"q": lambda x: x[..., :12].contiguous()}, "not aligned to 16 bytes|head size 12"),
        ({"k": lambda x: x[:, :1].expand(-1, 3, -1).contiguous()}, "shapes"),
    ],
)
def test_the_kernel_rejects(change: dict, message: str) -> None:
    """Inputs that the real kernel rejects, or for which it would read wrong memory, raise."""
    names = ("q", "k", "v", "cu_q", "cu_k", "max_q", "max_k")
    right = dict(zip(names, kernel_inputs(), strict=True))
    flash_attention.check_inputs(*right.values())
    for name, how in change.items():
        right[name] = how(right[name]) if callable(how) else right[name].to(how) if name not in ("max_q", "max_k") else how
    with pytest.raises(RuntimeError, match=message):
        flash_attention.check_inputs(*right.values())
