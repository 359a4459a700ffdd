"""Process groups for tensors on the emulated device, with the rules of NCCL.

A group of backend `cpu:gloo,cuda:nccl` sends CPU tensors through gloo, as in a real run. Tensors on
the emulated device must be contiguous and on the current device. Before each collective on them,
all ranks of the group exchange the name, dtype and size of the call. A difference, such as a
collective that one rank leaves out, raises RuntimeError on every rank; NCCL would wait forever or
mix up the data. A rank that makes no further call lets the others fail after TIMEOUT_S.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

TIMEOUT_S = 60
collectives: list[str] = []
"""Collectives on device tensors that this rank has called, in order, with dtype and size."""


def on_host(tensors):  # noqa: ANN001
    """Return CPU tensors on the same memory, for a tensor or nested lists of tensors."""
    if isinstance(tensors, torch.Tensor):
        return torch.ops.emulated_cuda.host_alias(tensors.detach())
    return [on_host(each) for each in tensors]


def flatten(tensors) -> list[torch.Tensor]:  # noqa: ANN001
    """Return the tensors of nested lists in order."""
    return [tensors] if isinstance(tensors, torch.Tensor) else [tensor for each in tensors for tensor in flatten(each)]


class EmulatedGroup(dist.ProcessGroup):
    """Process group that sends both CPU tensors and tensors of the emulated device through gloo."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._name = store, ""
        self._gloo = dist.ProcessGroupGloo(store, rank, size, min(timeout, timedelta(seconds=TIMEOUT_S)))

    def _check(self, operation: str, *tensors: object, is_collective: bool = True) -> None:
        """Raise RuntimeError if NCCL would reject the tensors, or if another rank calls a different
        collective.
        """
        given = flatten(tensors)
        on_device = [tensor for tensor in given if tensor.is_cuda]
        if not on_device:
            return
        for tensor in given:
            if tensor.device != torch.device("cuda", torch.cuda.current_device()):
                raise RuntimeError(f"NCCL: {operation}: the tensor is on {tensor.device}, the rank uses {torch.cuda.current_device()}")
            if not tensor.is_contiguous():
                raise RuntimeError(f"NCCL: {operation}: tensors must be contiguous")
        call = f"{operation} {[(str(tensor.dtype), tensor.numel()) for tensor in given]}"
        collectives.append(call)
        if is_collective and self.size() > 1:
            self._require_same_call(call)

    def _require_same_call(self, call: str) -> None:
        mine = torch.zeros(512, dtype=torch.uint8)
        encoded = call.encode()[:512]
        mine[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        calls = [torch.empty_like(mine) for _ in range(self.size())]
        self._gloo.allgather([calls], [mine]).wait()
        texts = [bytes(each.tolist()).rstrip(b"\0").decode() for each in calls]
        if len(set(texts)) > 1:
            raise RuntimeError(f"NCCL: ranks of a group call different collectives: {texts}")

    def _reduce_by(self, op: dist.ReduceOp) -> tuple[dist.ReduceOp, int]:
        """Return the reduction that gloo runs, and a divisor: gloo has no average."""
        return (dist.ReduceOp.SUM, self.size()) if str(op).endswith("AVG") else (op, 1)

    def allreduce(self, tensors, opts=None):  # noqa: ANN001
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        self._check("all_reduce", tensors)
        options, ours = dist.AllreduceOptions(), on_host(tensors)
        options.reduceOp, divisor = self._reduce_by(opts.reduceOp if opts else dist.ReduceOp.SUM)
        work = self._gloo.allreduce(ours, options)
        if divisor > 1:
            work.wait()
            for tensor in ours:
                tensor.div_(divisor)
        return work

    def allreduce_coalesced(self, tensors, opts=None):  # noqa: ANN001
        return [self.allreduce([tensor], opts) for tensor in tensors][-1]

    def broadcast(self, tensors, opts):  # noqa: ANN001
        self._check(f"broadcast from {opts.rootRank}", tensors)
        return self._gloo.broadcast(on_host(tensors), opts)

    def allgather(self, outputs, inputs, opts=None):  # noqa: ANN001
        self._check("all_gather", inputs, outputs)
        return self._gloo.allgather(on_host(outputs), on_host(inputs))

    def _allgather_base(self, output, given, opts=None):  # noqa: ANN001
        self._check("all_gather_into_tensor", given, output)
        parts = list(on_host(output).view(self.size(), -1).unbind(0))
        found = [torch.empty_like(part) for part in parts]
        work = self._gloo.allgather([found], [on_host(given).reshape(-1)])
        work.wait()
        for part, value in zip(parts, found, strict=True):
            part.copy_(value)
        return work

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):  # noqa: ANN001
        return [self._allgather_base(output, given) for output, given in zip(outputs, inputs, strict=True)][-1]

    def _reduce_scatter_base(self, output, given, opts=None):  # noqa: ANN001
        self._check("reduce_scatter_tensor", given, output)
        whole, options = on_host(given).clone(), dist.AllreduceOptions()
        options.reduceOp, divisor = self._reduce_by(opts.reduceOp if opts else dist.ReduceOp.SUM)
        work = self._gloo.allreduce([whole], options)
        work.wait()
        on_host(output).copy_(whole.view(self.size(), -1)[self.rank()].view(output.shape) / divisor)
        return work

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):  # noqa: ANN001
        return [self._reduce_scatter_base(output, given, opts) for output, given in zip(outputs, inputs, strict=True)][-1]

    def reduce_scatter(self, outputs, inputs, opts=None):  # noqa: ANN001
        flat = [torch.cat([tensor.reshape(-1) for tensor in given]) for given in inputs]
        return self.reduce_scatter_tensor_coalesced(outputs, flat, opts)

    def reduce(self, tensors, opts):  # noqa: ANN001
        self._check(f"reduce to {opts.rootRank}", tensors)
        return self._gloo.reduce(on_host(tensors), opts)

    def gather(self, outputs, inputs, opts):  # noqa: ANN001
        self._check("gather", inputs)
        return self._gloo.gather(on_host(outputs), on_host(inputs), opts)

    def scatter(self, outputs, inputs, opts):  # noqa: ANN001
        self._check("scatter", outputs)
        return self._gloo.scatter(on_host(outputs), on_host(inputs), opts)

    def alltoall_base(self, output, given, output_sizes, input_sizes, opts=None):  # noqa: ANN001
        self._check("all_to_all_single", given, output)
        return self._gloo.alltoall_base(on_host(output), on_host(given), output_sizes, input_sizes, opts)

    def send(self, tensors, target, tag=0):  # noqa: ANN001
        self._check(f"send to {target}", tensors, is_collective=False)
        return self._gloo.send(on_host(tensors), target, tag)

    def recv(self, tensors, source, tag=0):  # noqa: ANN001
        self._check(f"receive from {source}", tensors, is_collective=False)
        return self._gloo.recv(on_host(tensors), source, tag)

    def barrier(self, opts=None):  # noqa: ANN001
        return self._gloo.barrier(dist.BarrierOptions())

    # torch 2.13 calls collectives on one tensor by these names as well
    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    all_gather_into_tensor_coalesced, all_to_all_single = allgather_into_tensor_coalesced, alltoall_base
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced

    @property
    def pg_name(self) -> str:
        self._name = distributed_c10d._world.pg_names.get(self, self._name)  # kept after the group is destroyed
        return self._name

    @property
    def group_name(self) -> str:
        return self.pg_name

    def getBackendName(self) -> str:
        return "emulated"

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def supports_splitting(self) -> bool:
        return False


def install() -> None:
    """Use EmulatedGroup for groups with NCCL; gloo and fake groups stay as they are."""
    dist.Backend.register_backend("emulated", EmulatedGroup, devices=["cpu", "cuda"])
    init, new_group = dist.init_process_group, dist.new_group

    def replaced(backend: str | None) -> str | None:
        return "emulated" if backend is not None and "nccl" in backend else backend

    def init_process_group(backend: str | None = None, *arguments: object, **options: object) -> None:
        init(replaced(backend), *arguments, **options)

    def make_group(ranks=None, timeout=None, backend=None, pg_options=None, **options):  # noqa: ANN001, ANN003
        return new_group(ranks, timeout, replaced(backend), **options)  # the options are those of NCCL

    dist.init_process_group, dist.new_group, distributed_c10d.new_group = init_process_group, make_group, make_group
