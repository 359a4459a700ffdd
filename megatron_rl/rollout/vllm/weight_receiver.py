"""Loads Hugging Face weights into a running vLLM model in place, and verifies them.

vLLM's own loader writes the weights. Independently of the loader, this module maps each HF tensor
to its location in the engine's memory. The location may be a part of a fused q/k/v or gate/up
parameter. With engine.tp > 1, only this rank's slice of the tensor is mapped. Each tensor is
checksummed when it is received and, after loading, at its mapped location. The checksums detect
errors in the loader and errors in the map. Written against vLLM 0.32.0:
model_executor/layers/{linear,vocab_parallel_embedding}.py.

On a CPU, vLLM would repack the weights of Linear layers into oneDNN handlers and leave the original
tensors empty. `disable_weight_packing` prevents this, so that loading is a plain copy and the
weights can be read back. Generation is equally fast without packing: the nano model (1.1M
parameters, float32, one AVX-512 core, 256 requests x 28 tokens) takes 0.92 to 0.98 CPU seconds per
batch of rollouts in both cases. The alternative, vLLM's layerwise reload, takes 20 to 30 ms per
weight sync, and the reloaded weights cannot be read back.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from megatron_rl.models.name_mapping import canonical_name, nested_name

CHECKSUM_CHUNK = 1 << 14
"""Number of 64-bit words per chunk in `checksum`. In every chunk, word i is multiplied by the same
factor a_i.
"""
WORD_FACTOR = 0x61C8864680B583EB
CHUNK_FACTOR = 0x2545F4914F6CDD1D


HF_PREFIXES = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head.", "visual.": "model.visual."}
"""Maps vLLM's name prefixes to the newer Hugging Face prefixes. vLLM's loader receives names with
the newer prefixes, because its newer model families do not accept the older prefixes (model.,
visual.).
"""


def disable_weight_packing() -> None:
    """Make vLLM's CPU Linear layers use `layer.weight` instead of a packed copy.

    Call this function before the engine is built. The function disables the AMX and oneDNN packing
    that vLLM 0.32.0 tries first in `model_executor/layers/utils.py::dispatch_cpu_unquantized_gemm`.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    from megatron_rl.rollout.vllm.delta_net_engine import use_torch_delta_nets
    from megatron_rl.rollout.vllm.expert_weights import use_unpacked_experts

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
    use_unpacked_experts()
    use_torch_delta_nets()


def checksum(tensor: torch.Tensor) -> int:
    """Return a position-dependent 64-bit sum over a tensor's bytes.

    The sum is sum_c b_c sum_i a_i w_ci modulo 2^64, where w_ci is word i of chunk c and all factors
    a_i and b_c are odd. Flipping one bit changes the sum by odd * odd * 2^k, which is not 0 modulo
    2^64, so two tensors that differ in one bit never have the same sum. The sum is computed on the
    tensor's device; for 8 MB on one CPU core, this takes 1.1 ms.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    words = (nn.functional.pad(data, (0, -data.numel() % 8)) if data.numel() % 8 else data).view(torch.int64)
    factors = _odd_factors(words.device)
    whole = words.numel() // CHECKSUM_CHUNK * CHECKSUM_CHUNK
    total = 0
    if whole:
        sums = (words[:whole].view(-1, CHECKSUM_CHUNK) * factors).sum(1)
        total = int((sums * ((torch.arange(sums.numel(), device=words.device) * CHUNK_FACTOR) | 1)).sum())
    if whole < words.numel():
        total = 31 * total + int((words[whole:] * factors[: words.numel() - whole]).sum())
    return total % (1 << 64)


@cache
def _odd_factors(device: torch.device) -> torch.Tensor:
    return (torch.arange(CHECKSUM_CHUNK, device=device) * WORD_FACTOR) | 1


@dataclass(slots=True, frozen=True)
class WeightSlice:
    """This rank's slice of an HF tensor along `dim`, with the engine memory that stores it."""

    memory: torch.Tensor
    dim: int
    start: int


@dataclass(slots=True, frozen=True)
class EngineTensorLocation:
    """Location of an HF tensor in the engine: its full shape and this rank's slices of it."""

    shape: torch.Size
    slices: list[WeightSlice]

    def sent_checksums(self, tensor: torch.Tensor) -> list[int]:
        """Return the checksums of the slices of `tensor` that this rank should have."""
        return [checksum(tensor.narrow(piece.dim, piece.start, piece.memory.shape[piece.dim])) for piece in self.slices]

    def held_checksums(self) -> list[int]:
        """Return the checksums of the slices in the engine's memory."""
        return [checksum(piece.memory) for piece in self.slices]


def cut_location(param: torch.Tensor, *, dim: int, rank: int, tp: int) -> EngineTensorLocation:
    """Return the location of a tensor that is sharded along `dim`; `param` is this rank's shard."""
    size = param.shape[dim]
    shape = list(param.shape)
    shape[dim] = size * tp
    return EngineTensorLocation(shape=torch.Size(shape), slices=[WeightSlice(param, dim, rank * size)])


def stacked_locations(param: torch.Tensor, *, sizes: list[int], rank: int, tp: int) -> list[EngineTensorLocation]:
    """Return the locations of the tensors that are fused along dimension 0 of `param`.

    Each of the fused tensors is sharded across ranks separately.
    """
    return [cut_location(part, dim=0, rank=rank, tp=tp) for part in param.split(sizes)]


def _module_locations(prefix: str, module: nn.Module, kind: str, param: torch.Tensor) -> dict[str, EngineTensorLocation]:
    """Return the locations of all HF tensors that are stored in an engine parameter.

    The parameter is the `kind` (weight or bias) of the module named `prefix`. The locations are
    keyed by engine name; for a fused parameter such as qkv_proj, the keys are the unfused names
    (q_proj, k_proj and v_proj).
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    from megatron_rl.rollout.vllm.expert_weights import expert_locations

    name = f"{prefix}.{kind}"
    assert param.numel(), f"{name} was replaced by a packed copy: disable_weight_packing must run before the engine is built"
    if isinstance(module, RoutedExperts):
        return expert_locations(prefix, module, kind, param)
    if isinstance(module, QKVParallelLinear):
        assert module.num_kv_head_replicas == 1, f"{name}: replicated key/value heads are not supported"
        sizes = [module.num_heads * module.head_size, module.num_kv_heads * module.head_size, module.num_kv_heads * module.head_size]
        places = stacked_locations(param, sizes=sizes, rank=module.tp_rank, tp=module.tp_size)
        if prefix.endswith(".qkv_proj"):
            stem = prefix.removesuffix("qkv_proj")
            return {f"{stem}{part}.{kind}": place for part, place in zip(("q_proj", "k_proj", "v_proj"), places, strict=True)}
        return {name: join_locations(places)}
    if isinstance(module, MergedColumnParallelLinear):
        places = stacked_locations(param, sizes=module.output_partition_sizes, rank=module.tp_rank, tp=module.tp_size)
        stem = prefix.removesuffix("gate_up_proj")
        assert stem != prefix and len(places) == 2, f"{name}: unknown fused layer"
        return {f"{stem}{part}.{kind}": place for part, place in zip(("gate_proj", "up_proj"), places, strict=True)}
    if isinstance(module, ColumnParallelLinear):
        return {name: cut_location(param, dim=0, rank=module.tp_rank, tp=module.tp_size)}
    if isinstance(module, RowParallelLinear) and kind == "weight":
        return {name: cut_location(param, dim=1, rank=module.tp_rank, tp=module.tp_size)}
    if isinstance(module, VocabParallelEmbedding):
        rows = module.shard_indices
        shape = torch.Size((module.org_vocab_size, *param.shape[1:]))
        return {
            name: EngineTensorLocation(shape=shape, slices=[WeightSlice(param[: rows.num_org_elements], 0, rows.org_vocab_start_index)])
        }
    return {name: EngineTensorLocation(shape=param.shape, slices=[WeightSlice(param, 0, 0)])}


def join_locations(places: list[EngineTensorLocation]) -> EngineTensorLocation:
    """Return the location of a fused HF tensor, such as the vision tower's qkv.

    The fused parts are sharded across ranks separately.
    """
    pieces, offset = [], 0
    for place in places:
        pieces += [WeightSlice(piece.memory, piece.dim, offset + piece.start) for piece in place.slices]
        offset += place.shape[0]
    return EngineTensorLocation(shape=torch.Size((offset, *places[0].shape[1:])), slices=pieces)


def to_hf_name(engine_name: str) -> str:
    """Return the HF name for an unfused engine name."""
    (name,) = (theirs + engine_name.removeprefix(ours) for ours, theirs in HF_PREFIXES.items() if engine_name.startswith(ours))
    return name


def split_into_buckets(tensors: Iterable[tuple[str, torch.Tensor]], num_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Split tensors into buckets of at least `num_bytes` bytes; the last bucket may be smaller.

    A bucket ends with the tensor that makes it reach `num_bytes`.
    """
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        bucket.append((name, tensor))
        size += tensor.nbytes
        if size >= num_bytes:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


class EngineWeights:
    """Weights of an engine. An update must contain each HF tensor exactly once."""

    def __init__(self, model: nn.Module, *, bucket_bytes: int) -> None:
        from megatron_rl.rollout.vllm.delta_net_engine import FUSED_PARAMETERS, delta_net_locations, is_delta_net

        self._model: Any = model  # of one of vLLM's classes, which have these methods
        self._bucket_bytes = bucket_bytes
        self._locations: dict[str, EngineTensorLocation] = {}
        met: set[nn.Parameter] = set()
        for prefix, module in model.named_modules():
            if is_delta_net(module):
                self._locations |= delta_net_locations(prefix, module)
                met |= {module.get_parameter(name) for name in FUSED_PARAMETERS}
            for kind, param in module.named_parameters(recurse=False):
                if param not in met:  # a tied head is the embedding's parameter, which comes first and is sent
                    self._locations |= _module_locations(prefix, module, kind, param.data)
                met.add(param)

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load (HF name, full tensor) pairs, one bucket of `bucket_bytes` at a time.

        A yielded tensor must not change until its bucket is loaded.

        Raises:
            RuntimeError: A tensor is unexpected, sent twice, missing or of the wrong shape, or its
                values in the engine differ from the sent values. The message names the tensors.
        """
        arrival = WeightReceiver(self)
        for bucket in split_into_buckets(tensors, self._bucket_bytes):
            arrival.receive_bucket(bucket)
        arrival.finish()

    def location(self, engine_name: str) -> EngineTensorLocation | None:
        """Return the location of a tensor; None if the engine does not have the tensor."""
        return self._locations.get(engine_name)

    @property
    def names(self) -> set[str]:
        """Engine names of all tensors."""
        return set(self._locations)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shapes of all tensors, keyed by HF name."""
        return {to_hf_name(name): tuple(place.shape) for name, place in self._locations.items()}

    def load_bucket(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        """Pass a bucket to vLLM's loader, which copies it into the live parameters."""
        self._model.load_weights(iter(bucket))

    def to_engine_name(self, name: str) -> str:
        """Return the engine name of an HF tensor."""
        (own_name,) = self._model.hf_to_vllm_mapper.apply_list([name]) or [name]
        return own_name


class WeightReceiver:
    """Receives one update of an engine's weights, bucket by bucket."""

    def __init__(self, weights: EngineWeights) -> None:
        self._weights = weights
        self._sent: dict[str, list[int]] = {}
        self._names: dict[str, str] = {}

    def receive_bucket(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        """Pass (HF name, full tensor) pairs to vLLM's loader.

        Raises:
            RuntimeError: A tensor is unexpected, was sent before, or has the wrong shape.
        """
        fitting: list[tuple[str, torch.Tensor]] = []
        for name, tensor in ((nested_name(canonical_name(name)), tensor) for name, tensor in bucket):
            own_name = self._weights.to_engine_name(name)
            place = self._weights.location(own_name)
            if place is None:
                raise RuntimeError(f"weight sync: the engine has no parameter for {name}")
            if own_name in self._sent:
                raise RuntimeError(f"weight sync: {name} was sent twice")
            if tensor.shape != place.shape:
                raise RuntimeError(
                    f"weight sync: {name} was sent with shape {tuple(tensor.shape)}, "
                    f"but the engine's parameter has shape {tuple(place.shape)}"
                )
            tensor = tensor.detach().to(place.slices[0].memory.dtype)
            self._sent[own_name], self._names[own_name] = place.sent_checksums(tensor), name
            fitting.append((name, tensor))
        self._weights.load_bucket(fitting)

    def finish(self) -> None:
        """Verify that all tensors were sent, and that the engine's weights equal the sent weights.

        Raises:
            RuntimeError: A tensor was not sent, or its values in the engine differ from the sent
                values.
        """
        if missing := sorted(self._weights.names - self._sent.keys()):
            raise RuntimeError(f"weight sync: {len(missing)} tensors were not sent: {', '.join(map(to_hf_name, missing))}")
        places = {name: self._weights.location(name) for name in self._sent}
        held = {name: place.held_checksums() for name, place in places.items() if place is not None}
        wrong = [self._names[name] for name, sums in self._sent.items() if held[name] != sums]
        if wrong:
            raise RuntimeError(f"weight sync: the engine's weights differ from the sent weights: {', '.join(wrong)}")
