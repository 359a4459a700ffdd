"""Host buffers that are allocated once: restored contents, buffer addresses, and the reference
policy's logprobs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.config import AlgoSettings, OptimSettings
from megatron_rl.policy import offload
from megatron_rl.policy.offload import HostCopy
from tests.support.packed_example import make_example_items
from tests.support.single_process_policy import make_policy_and_renderer, single_process_world


@pytest.fixture
def world() -> Iterator[None]:
    with single_process_world():
        yield


def parameters() -> dict[str, torch.nn.Parameter]:
    """Return two overlapping views of one storage, one of them transposed, a bfloat16 tensor with
    its own storage, and a tensor with an odd number of bytes."""
    numbers = torch.randn(60, generator=torch.Generator().manual_seed(0))
    tensors = {
        "window": numbers[4:24].view(4, 5),
        "across": numbers[10:50].view(8, 5).t()[:, ::2],
        "halves": numbers[:7].to(torch.bfloat16),
        "bytes": numbers[:33].to(torch.float8_e4m3fn),
    }
    tensors["halves"][3] = float("nan")
    return {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}


def bits(named: dict[str, torch.nn.Parameter]) -> dict[str, bytes]:
    return {name: p.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes() for name, p in named.items()}


def places(copy: HostCopy) -> list[int]:
    return [host.data_ptr() for _, host in copy.pairs]


def test_they_leave_and_come_back_to_the_bit_by_the_same_room() -> None:
    """Tensors are offloaded and restored bit for bit, three times, with the same host buffers.

    Views of one storage are stored once and share memory afterwards.
    """
    named = parameters()
    shared = named["window"].untyped_storage()
    assert shared.data_ptr() == named["across"].untyped_storage().data_ptr() and not named["across"].is_contiguous()
    copy = HostCopy(named.values())
    assert sorted(host.numel() for _, host in copy.pairs) == [14, 33, 240], "a storage that two share is held once"
    room, ours = places(copy), [id(p) for p in named.values()]
    for number in range(3):
        named["window"].add_(number)
        before = bits(named)
        copy.copy_to_host()
        copy.free_device_memory()
        assert {p.untyped_storage().nbytes() for p in named.values()} == {0}
        copy.restore()
        assert bits(named) == before
        assert places(copy) == room and [id(p) for p in named.values()] == ours
    named["window"].view(-1)[6] = 7.0
    assert shared.nbytes() == 240 and named["across"][0, 0] == 7.0, "entry 10 of the storage that both still look at"


def test_they_change_places_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swapping exchanges device and host contents piece by piece, without new buffers.

    Pieces have 32 bytes: the longest storage is no multiple of a piece, and others are shorter than
    one.
    """
    monkeypatch.setattr(offload, "_PIECE", 32)
    named = parameters()
    copy = HostCopy(named.values())
    copy.copy_to_host()
    first, room = bits(named), places(copy)
    named["window"].mul_(2.0)
    named["halves"].add_(1.0)
    second = bits(named)
    assert first != second
    for expected in (first, second, first, second):
        copy.swap()
        assert bits(named) == expected
    assert places(copy) == room


def test_nothing_is_locked_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are not on a GPU are copied without pinning memory."""
    monkeypatch.setattr(offload, "pin_memory", None)
    copy = HostCopy(parameters().values())
    copy.copy_to_host()
    assert copy.pairs and all(bytes(host.numpy()) == bytes(storage.tolist()) for storage, host in copy.pairs)


def test_the_reference_speaks_as_the_policy_did_and_leaves_no_trace(world: None, random_model: Path) -> None:
    """Reference logprobs after updates equal the initial logprobs bit for bit, and the current
    weights are restored bit for bit, with the same host buffers. This is done twice, with an update
    in between."""
    policy, renderer = make_policy_and_renderer(random_model, OptimSettings(lr=0.1), keep_reference=True)
    batches = policy.pack(make_example_items(renderer), max_tokens=10_000)
    (begun,), room = policy.logprobs(batches), places(policy.reference)
    for step in range(2):
        policy.update(batches, make_policy_objective(AlgoSettings()), step=step)
        before = {name: tensor.clone() for name, tensor in policy.hf_weights()}
        assert torch.equal(policy.logprobs(batches, weights="reference")[0], begun)
        assert all(torch.equal(tensor, before[name]) for name, tensor in policy.hf_weights())
        assert not torch.equal(policy.logprobs(batches)[0], begun)
    assert places(policy.reference) == room
    held = sum(host.numel() for _, host in policy.reference.pairs)
    assert held == sum({p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in policy.network.chunks.parameters()}.values())
