"""Watches FakeTensors of an update: bytes on the GPU, and operations for which the host would wait.

FakeTensors have a shape, a dtype and a device, but no memory. `FakeGpu` is a dispatch mode above
FakeTensorMode: it adds up the sizes of storages on "cuda" as the caching allocator rounds them,
and answers the operations that read numbers.
"""

import traceback
import weakref
from collections import Counter
from pathlib import Path

import torch
from torch._C._distributed_c10d import FakeWork
from torch.distributed import _functional_collectives  # noqa: F401 (registers the operators of collectives)
from torch.nn.attention import varlen  # noqa: F401 (registers the operators of attention)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megatron_rl.models.model_spec import ModelSpec
from tests.support.cuda.device import NUM_FRAMES, OUR_CODE
from tests.support.cuda.flash_attention import allocate_workspace

BLOCK_BYTES = 512
aten = torch.ops.aten
BACKWARD = torch.ops.torch_attn._varlen_attn_backward.default
UNSUPPORTED = (torch.ops.c10d.reduce_scatter_tensor_coalesced_.default, torch.ops.c10d.allgather_into_tensor_coalesced_.default)
"""Collectives of Megatron's buffers that have no implementation for FakeTensors."""


class FakeGpu(TorchDispatchMode):
    """Counts the bytes of storages on "cuda" and the waits of the host."""

    def __init__(self, model: ModelSpec | None = None) -> None:
        """Create the mode. The tokens choose each of the model's experts equally often."""
        super().__init__()
        self._experts = model.experts if model is not None else None
        self.live = self.peak = self.backward_peak = 0
        self.waits: Counter[str] = Counter()
        """Waits by operation and calling places, as tests.support.cuda.device.waits."""
        self._sizes: dict[int, tuple[int, str]] = {}
        self._pinned: list[torch.Tensor] = []
        self.largest: Counter[str] = Counter()
        """Bytes at the peak by operation and shape of the storage's first tensor."""

    def reset_peak(self) -> None:
        """Start a new measurement of the peak."""
        self.peak = self.live

    def end_backward(self) -> None:
        """Store the peak of an update's forward and backward passes."""
        self.backward_peak = max(self.backward_peak, self.peak)

    def record(self, operation: str) -> None:
        """Count a wait."""
        self.waits[" < ".join([operation, *_places()])] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204 (signature fixed by torch)
        kwargs = dict(kwargs or {})
        on_device = [tensor.is_cuda for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        if func is aten._local_scalar_dense.default:
            return self._read_number(args[0])
        if func in UNSUPPORTED:
            return FakeWork().boxed()
        if func is aten._pin_memory.default:
            return self._pin(torch.empty_like(args[0]))
        is_pinned = kwargs.pop("pin_memory", None)
        self._find_waits(func, args, kwargs, on_device)
        out = self._select(*args) if func is aten.masked_select.default else func(*args, **kwargs)
        if is_pinned:
            self._pin(out)
        if func is BACKWARD:
            self._count_workspace(args)
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                self._count(tensor, func)
        return out

    def _select(self, values: torch.Tensor, mask_EN: torch.Tensor) -> torch.Tensor:
        """Return the entries of the tokens [N] that chose the E experts of this rank."""
        assert self._experts is not None
        num_experts, num_tokens = mask_EN.shape
        return values.new_empty(num_tokens * self._experts.top_k * num_experts // self._experts.num_experts)

    def _read_number(self, tensor: torch.Tensor) -> float:
        """Answer an item read: 1 for a number, True for a check, 0 for an integer on the host."""
        if tensor.is_cuda:
            self.record("item")
        return 1.0 if tensor.dtype.is_floating_point else tensor.dtype == torch.bool

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned.append(tensor)
        return tensor

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return any(tensor.untyped_storage()._cdata == pinned.untyped_storage()._cdata for pinned in self._pinned)

    def _find_waits(self, func, args, kwargs, on_device: list[bool]) -> None:  # noqa: ANN001
        if func in (aten.nonzero.default, aten.masked_select.default, aten.equal.default, aten._unique2.default) and any(on_device):
            self.record(func.name().removeprefix("aten::"))
        if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default) and any(on_device):
            indices = [index for index in args[1] if index is not None]
            fills = func is not aten.index.Tensor and args[2].numel() == 1 and not args[2].is_cuda  # becomes masked_fill_
            if any(index.dtype == torch.bool for index in indices) and not fills:
                self.record("nonzero of a mask")
            if any(not index.is_cuda for index in indices):
                self.record("index on the host")
        if func is aten.copy_.default and args[0].is_cuda != args[1].is_cuda:
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            self._copy(args[:2], to_device=args[0].is_cuda, non_blocking=non_blocking)
        if func is aten._to_copy.default:
            there = torch.device(kwargs.get("device") or args[0].device).type == "cuda"
            if there != args[0].is_cuda:
                self._copy(args[:1], to_device=there, non_blocking=kwargs.get("non_blocking", False))

    def _copy(self, tensors: tuple[torch.Tensor, ...], *, to_device: bool, non_blocking: bool) -> None:
        """Count a copy between host and device, unless it is asynchronous with pinned memory."""
        is_pinned = any(self._is_pinned(tensor) for tensor in tensors if not tensor.is_cuda)
        if is_pinned and non_blocking:
            return
        direction = "device" if to_device else "host"
        self.record(f"copy to {direction}" + (" from unpinned memory" if to_device and not is_pinned else ""))

    def _count_workspace(self, args: tuple) -> None:
        """Count the workspace of flash attention's backward pass, which exists during the call."""
        _, q, k, _, _, _, cu_q, *_ = args
        assert q.dim() == k.dim() == 3 and cu_q.dim() == 1
        workspace = allocate_workspace(q, k, num_segments=len(cu_q) - 1)
        for tensor in workspace:
            self._count(tensor, BACKWARD)

    def _count(self, tensor: torch.Tensor, func: object) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        self._sizes[key] = (size, f"{func} {tuple(tensor.shape)} {tensor.dtype}")
        self.live += size
        weakref.finalize(storage, self._drop, key, size)
        if self.live > self.peak:
            if self.live > 1.02 * self.peak:
                self.largest = Counter()
                for each, label in self._sizes.values():
                    self.largest[label] += each
            self.peak = self.live

    def _drop(self, key: int, size: int) -> None:
        self._sizes.pop(key, None)
        self.live -= size


def _places() -> list[str]:
    frames = [frame for frame in traceback.extract_stack() if OUR_CODE.search(frame.filename) and "full_size" not in frame.filename]
    return [f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-NUM_FRAMES:])]
