"""Runs policy updates on a nonexistent device and counts every wait of the host for it. Run by
test_waits.py.

    fake_device.py MODELS OUT CASE ...

A case is written as 2,1,full,0,3,norm: number of blocks per tower, tensor-parallel size,
recomputation, LoRA rank, number of micro-batches, and a planted bug (none, or one of PLANTED_BUGS).

Tensors have a shape and a device but no data (torch's FakeTensorMode). The device is "meta" instead
of CUDA, for which torch's autograd has no streams in a CPU build. The forward and backward pass,
Megatron's schedule and its optimizer run to the end. Operations that mix a host tensor with a
device tensor raise.
"""

import json
import sys
import traceback
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from torch import nn
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only

from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.algo.value import make_value_objective, shared_value_loss
from megatron_rl.batching.packing import pack
from megatron_rl.compat import megatron_cpu
from megatron_rl.config import AlgoSettings, CriticSettings, LoraSettings, ModelSettings, OptimSettings, ParallelSettings
from megatron_rl.dtypes import torch_dtype
from megatron_rl.models.hf_config import read_spec
from megatron_rl.policy import attention, network, policy, transformer, vision
from megatron_rl.policy.load_model import LoadedModel
from megatron_rl.policy.network import TrainingSettings
from megatron_rl.policy.parallel import build_layout
from megatron_rl.policy.patches import images_of_rank
from megatron_rl.policy.transformer import build_chunks
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import MicroBatch, SpecialTokens
from tests.support.packed_example import make_example_items

DEVICE = "meta"
aten = torch.ops.aten


class HostSyncCounter(TorchDispatchMode):
    """Counts the operations for which the host waits, by their call site.

    Values that the host reads from the device are ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def record(self, operation: str) -> None:
        frames = [f for f in traceback.extract_stack() if "megatron" in f.filename and not f.filename.endswith("/megatron_cpu.py")]
        self.counts[" < ".join([operation, *(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-3:]))])] += 1

    def tolist(self, tensor: torch.Tensor) -> list:
        """Replace FakeTensor's tolist, which reads every number separately."""
        self.record("tolist")
        return np.ones(tensor.shape).tolist()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204 (signature fixed by torch)
        kwargs = kwargs or {}
        on_device = [t.device.type == DEVICE for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        if func is aten._local_scalar_dense.default:
            self.record("item") if any(on_device) else None
            return 1.0 if args[0].dtype.is_floating_point else args[0].dtype == torch.bool  # integers: 0 ranks report an error
        if func in (torch.ops.c10d.reduce_scatter_tensor_coalesced_.default, torch.ops.c10d.allgather_into_tensor_coalesced_.default):
            return FakeWork().boxed()  # the only collectives of Megatron without shapes in torch
        if func is aten.nonzero.default:
            self.record("nonzero")
            return args[0].new_empty((8, args[0].dim()), dtype=torch.long)
        if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default) and any(on_device):
            indices = [index for index in args[1] if index is not None]
            is_fill = len(args) > 2 and args[2].numel() == 1  # ATen turns it into a masked_fill
            if any(index.device.type != DEVICE or (index.dtype == torch.bool and not is_fill) for index in indices):
                self.record("index")
        if func is aten.copy_.default and any(on_device) and not all(on_device):
            self.record("copy")
        if func is aten._to_copy.default:
            there = torch.device(kwargs.get("device") or args[0].device).type
            if there != args[0].device.type and not (kwargs.get("non_blocking") and there == DEVICE):
                self.record(f"to {there}")
        return func(*args, **kwargs)


class TensorLiteralMode(TorchFunctionMode):
    """Creates tensor literals on the host and then moves them, as for CUDA.

    Device scalars in a literal are read one by one.
    """

    def __init__(self, waits: HostSyncCounter) -> None:
        super().__init__()
        self.counter = waits

    def __torch_function__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204 (signature fixed by torch)
        kwargs = kwargs or {}
        if func not in (torch.tensor, torch.Tensor.new_tensor):
            return func(*args, **kwargs)
        near = func is torch.Tensor.new_tensor
        device = args[0].device if near else torch.device(kwargs.pop("device", None) or "cpu")
        numbers = tree_map_only(torch.Tensor, lambda tensor: tensor.item(), args[near])
        made = torch.tensor(numbers, dtype=kwargs.get("dtype", args[0].dtype if near else None))
        made.constant = None  # otherwise torch would compute with its values on the fake device
        return made.to(device)


def compute_on_host(of_grids, grids, sizes):  # noqa: ANN001
    """Compute with real numbers what the host derives from its own data.

    Only the cu_ tensors keep their values.
    """
    with _disable_current_modes():
        known = of_grids(grids, sizes)
    return {name: tensor if name.startswith("cu_") else torch.empty_like(tensor) for name, tensor in known.items()}


def move_to_device(batch: MicroBatch, tp: int) -> MicroBatch:
    """Move a micro-batch to the fake device. grid_I3 stays on the host, and so do the patches of
    the images that rank 0 encodes, until a pass transfers them.
    """
    columns = {name: getattr(batch, name) for name in MicroBatch.__slots__ if name not in ("grid_I3", "patch_PC")}
    tensors = {name: torch.empty_like(value, device=DEVICE) for name, value in columns.items() if isinstance(value, torch.Tensor)}
    mine = images_of_rank(batch.images, tp)[0]
    patch_PC = torch.empty(sum(len(image.patch_PC) for image in mine), mine[0].patch_PC.shape[1])
    return replace(batch, patch_PC=patch_PC, **tensors)


def fake_varlen_kernel(q_TND, k_KMD, v_KMD, gathered, causal, scale):  # noqa: ANN001
    """Return an output of the kernel's shape."""
    return q_TND * (k_KMD.mean() + v_KMD.mean())


def empty_model(spec, layout, path, *, dtype, lora, heads, seed):  # noqa: ANN001
    """Replace build.load_model: create the model on the fake device without reading weights."""
    with _disable_current_modes(), megatron_cpu._patched_cuda(torch.device("cpu")):
        chunks = build_chunks(spec, layout, torch_dtype(dtype), lora=lora, heads=heads)
    for module in chunks.modules():
        for name, parameter in module.named_parameters(recurse=False):
            there = nn.Parameter(torch.empty_like(parameter, device=DEVICE), requires_grad=parameter.requires_grad)
            vars(there).update(vars(parameter))
            setattr(module, name, there)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=DEVICE))
        if isinstance(module, MultimodalRotaryEmbedding):
            module.inv_freq = torch.empty_like(module.inv_freq, device=DEVICE)
    return LoadedModel(chunks=chunks, rows=[], adapter_rows=[], placement=None)


def checking_norm(norm, x):  # noqa: ANN001
    """Compute the norm after checking its input, which makes the host wait."""
    assert x.isfinite().all()
    return RMSNORM(norm, x)


RMSNORM = transformer.RMSNorm.forward
PLANTED_BUGS = {
    "none": [],
    "norm": [(transformer.RMSNorm, "forward", checking_norm)],
    "index": [(attention, "to_device", lambda tensor, _: tensor)],
}


def gather_locally(found: list, shared_value: object, **_: object) -> None:
    """Replace all_gather_object for ranks that all contribute the same value."""
    found[:] = [shared_value] * len(found)


def count_update_waits(model: Path, *, tp: int, recompute: str, rank: int, micro_batches: int) -> Counter[str]:
    """Count the host's waits in one update.

    The update has a value head, images, a prompt that two sequences share, and more rows than one
    chunk of logits.
    """
    settings = ModelSettings(path=str(model))
    parallel = ParallelSettings(tp=tp, sequence_parallel=tp > 1, recompute=recompute, log_probs_chunk_size=4)
    renderer, lora, waits = Renderer(settings), LoraSettings(rank=rank), HostSyncCounter()
    batch = pack(
        make_example_items(renderer)[2:5], image_token_id=renderer.image_token_id, positions=read_spec(model).rope_positions,
        multiple_of=tp,
        share_prompts=True,
    )  # fmt: skip
    batch = replace(batch, old_value_T=batch.weight_T, return_T=batch.weight_T)
    FakeTensor.tolist = lambda tensor: waits.tolist(tensor)
    with FakeTensorMode(allow_non_fake_inputs=True), TensorLiteralMode(waits):
        trained = policy.Policy(
            settings, build_layout(parallel, seed=0),
            training=TrainingSettings(parallel=parallel, optim=OptimSettings(), num_steps=2, lora=lora or LoraSettings()),
            special_tokens=SpecialTokens(image_token_id=renderer.image_token_id), critic=CriticSettings(normalize_returns=True),
        )  # fmt: skip
        loss = shared_value_loss(
            make_policy_objective(AlgoSettings(clip_ratio_c=3.0)), make_value_objective(CriticSettings(), level="turns"), 0.5
        )
        here = move_to_device(batch, tp)
        waits.counts.clear()
        with waits:
            trained.update([here] * micro_batches, loss, step=0)
    trained.close()
    return waits.counts


def main() -> None:
    models, out = Path(sys.argv[1]), Path(sys.argv[2])

    optimizer._get_fused_kernels_supported_devices = lambda: [DEVICE]
    megatron_cpu.megatron_on_cpu = lambda: megatron_cpu._patched_cuda(torch.device(DEVICE))
    policy.load_model, policy.HfWeightIterator = empty_model, lambda *_, **__: None
    attention.has_varlen_kernel, attention.varlen_attention = lambda *_: True, fake_varlen_kernel
    vision.compute_grid_inputs = partial(compute_on_host, vision.compute_grid_inputs)
    found = {}
    network.prefetch = lambda _, batches: iter(batches)
    dist.all_gather_object = gather_locally
    for case in sys.argv[3:]:
        blocks, tp, recompute, rank, micro_batches, planted = case.split(",")
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=int(tp))
        with ExitStack() as mistakes:
            for owner, name, mistake in PLANTED_BUGS[planted]:
                mistakes.enter_context(patch.object(owner, name, mistake))
            found[case] = count_update_waits(
                models / blocks, tp=int(tp), recompute=recompute, rank=int(rank), micro_batches=int(micro_batches)
            )
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    (out / "waits.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
