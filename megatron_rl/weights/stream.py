"""Loads Hugging Face tensors into a live Megatron model and streams the model's weights out.

The weights are streamed as Hugging Face tensors, with a bounded amount of memory. Loading and
streaming use the name mappings of models/name_mapping.py.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from megatron_rl.models.name_mapping import ParamMapping, Tensors


class MegatronParameter(nn.Parameter):
    """Type of a parameter with the attributes that Megatron reads or sets; used only in casts."""

    sequence_parallel: bool
    tensor_model_parallel: bool
    average_gradients_across_tp_domain: bool
    allreduce: bool
    main_grad: torch.Tensor


@dataclass(slots=True, frozen=True)
class ShardLocation:
    """Position of this process in the model's parallel layout."""

    tp_rank: int
    tp_group: dist.ProcessGroup
    pp_rank: int
    pp_group: dist.ProcessGroup
    chunks: int
    """Number of model chunks on each pipeline stage. Layers are assigned to the stages chunk by
    chunk, as in Megatron's interleaved pipeline.
    """
    layers_per_chunk: int
    fused_norms: bool = False
    """True if norms are named as in the Transformer Engine spec (ParamMapping.fused_norm)."""
    ep_rank: int = 0
    ep: int = 1
    """Number of ranks that divide the experts among themselves."""
    tp_ep_group: dist.ProcessGroup | None = None
    """Ranks that hold the shards of all experts, with the tensor-parallel rank varying fastest;
    needed if ep > 1."""

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return self.tp_group.size()

    @property
    def pp(self) -> int:
        """Pipeline-parallel size."""
        return self.pp_group.size()

    def owner_stage(self, row: ParamMapping) -> int:
        """Return the pipeline stage that holds the parameter of this mapping."""
        return self._place(row)[0]

    def local_name(self, row: ParamMapping) -> str:
        """Return the parameter's name within the owner stage's chunks, for example `1.language...`.

        The layer number in the name counts from the first layer of the chunk.
        """
        _, chunk = self._place(row)
        name = row.fused_norm if self.fused_norms and row.fused_norm else row.mcore_name
        if ":" in row.stage:
            layer = _layer(row)
            name = name.replace(f".layers.{layer}.", f".layers.{layer % self.layers_per_chunk}.", 1)
        return f"{chunk}.{name}"

    def num_expert_shards(self, row: ParamMapping) -> int:
        """Return the number of shards along the experts; 1 for other parameters."""
        return 1 if row.expert_dim is None else self.ep

    def _place(self, row: ParamMapping) -> tuple[int, int]:
        """Return the pipeline stage that holds a parameter, and the chunk on that stage."""
        if ":" not in row.stage:
            return {"first": (0, 0), "last": (self.pp - 1, self.chunks - 1)}[row.stage]
        chunk, stage = divmod(_layer(row) // self.layers_per_chunk, self.pp)
        return stage, chunk


def _layer(row: ParamMapping) -> int:
    return int(row.stage.removeprefix("layer:"))


def load_hf(chunks: nn.ModuleList, rows: list[ParamMapping], placement: ShardLocation, read_tensor: Callable[[str], torch.Tensor]) -> None:
    """Fill this rank's parameters of the base model from Hugging Face tensors.

    `read_tensor` returns the full tensor with a given Hugging Face name. The caller has already
    checked that the source is complete. Adapters and value heads are not loaded.
    """
    base = {name: parameter for name, parameter in chunks.named_parameters() if not (is_adapter(name) or is_of_value_head(name))}
    fill_parameters(base, rows, placement, lambda row, _shape: tuple(map(read_tensor, row.hf_names)))


def is_adapter(name: str) -> bool:
    """Return True if a parameter name or distributed-checkpoint key belongs to a LoRA adapter.

    See weights/formats/peft.py.
    """
    return ".lora_" in name


def is_of_output_layer(row: ParamMapping) -> bool:
    """Return True for the mapping of the output layer, which a critic does not have."""
    return row.mcore_name.startswith("language.output_layer.")


def is_of_value_head(name: str) -> bool:
    """Return True if a parameter name or distributed-checkpoint key belongs to a value head.

    See policy/value_head.py.
    """
    return "value_head." in name


def fill_parameters(
    parameters: dict[str, nn.Parameter],
    rows: list[ParamMapping],
    placement: ShardLocation,
    tensors: Callable[[ParamMapping, torch.Size], Tensors],
) -> None:
    """Fill every parameter in `parameters` with its shard of the full Hugging Face tensors.

    `tensors` is called with a mapping and the shape of the unsharded Megatron parameter, and
    returns the mapping's full Hugging Face tensors. Raises ValueError if a converted tensor does
    not have the shape of the parameter.
    """
    left = dict(parameters)
    for row in _own_rows(rows, placement, parameters):
        parameter = left.pop(placement.local_name(row))
        num_shards = {row.shard_dim: placement.tp, row.expert_dim: placement.ep}
        whole = [size * num_shards.get(dim, 1) for dim, size in enumerate(parameter.shape)]
        value = row.to_mcore(tensors(row, torch.Size(whole)), placement.tp_rank, placement.tp)
        if row.expert_dim is not None:
            value = value.chunk(placement.ep, row.expert_dim)[placement.ep_rank]
        if value.shape != parameter.shape:
            shapes = f"shape {tuple(value.shape)} after conversion, but {row.mcore_name} has {tuple(parameter.shape)}"
            raise ValueError(f"{', '.join(row.hf_names)}: {shapes}")
        with torch.no_grad():
            parameter.copy_(value)
        # Megatron's initialization would set this attribute, but is skipped. The gradient norm
        # treats parameters without the attribute as replicas.
        cast("MegatronParameter", parameter).tensor_model_parallel = row.shard_dim is not None
    assert not left, f"parameters without a name mapping: {sorted(left)}"


def _own_rows(rows: list[ParamMapping], placement: ShardLocation, parameters: dict[str, nn.Parameter]) -> Iterator[ParamMapping]:
    """Yield the mappings of the parameters on this pipeline stage.

    If the embeddings and the output layer are tied and on the same stage, the output layer has no
    separate parameter, and its mapping is skipped.
    """
    for row in rows:
        if placement.owner_stage(row) == placement.pp_rank and (row.is_exported or placement.local_name(row) in parameters):
            yield row


class HfWeightIterator:
    """Streams the weights of a live model as full Hugging Face tensors, in a fixed order.

    Iteration is collective, and every rank receives all tensors. Parameters are gathered in
    buckets. Each bucket requires one all-gather over the tensor-parallel ranks, or over the ranks
    that hold the shards of all experts, and one broadcast from the pipeline stage that holds the
    bucket's parameters.
    """

    def __init__(
        self, chunks: nn.ModuleList, rows: list[ParamMapping], placement: ShardLocation, *,
        bucket_bytes: int, merged: Mapping[str, Callable[[], torch.Tensor]] | None = None,
    ) -> None:  # fmt: skip
        """Plan the buckets. Collective over the pipeline-parallel group.

        Args:
            chunks: Model chunks of this rank.
            rows: Name mappings of the parameters; mappings with is_exported=False are ignored.
            placement: Position of this rank in the layout.
            bucket_bytes: Maximum size in bytes of this rank's shards in one bucket; a larger
                parameter gets its own bucket.
            merged: Functions that compute a shard with its adapters merged in, keyed by the local
                name of the parameter. Other parameters are exported as they are.
        """
        self.placement = placement
        parameters = dict(chunks.named_parameters())
        rows = [row for row in rows if row.is_exported]
        mine = {row.mcore_name: parameters[placement.local_name(row)] for row in rows if placement.owner_stage(row) == placement.pp_rank}
        plans: list[dict[str, torch.Size]] = [{}] * placement.pp
        dist.all_gather_object(plans, {name: parameter.shape for name, parameter in mine.items()}, group=placement.pp_group)
        shapes = {name: shape for plan in plans for name, shape in plan.items()}
        any_parameter = next(iter(parameters.values()))
        self.dtype, self.device = any_parameter.dtype, any_parameter.device
        self.parameters = mine
        names = {row.mcore_name: placement.local_name(row) for row in rows}
        self.merged = {name: merged[names[name]] for name in mine if merged and names[name] in merged}
        self.buckets = _buckets(rows, shapes, placement, bucket_bytes // self.dtype.itemsize)
        self.shapes = shapes

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, full tensor) in a fixed order.

        A tensor may share memory with the model, so it must be used before the next update.
        """
        for bucket in self.buckets:
            shards_by_row = self._gather(bucket)
            for row in bucket:
                shards = self._join_experts(row, shards_by_row[row.mcore_name])
                yield from zip(row.hf_names, row.to_hf(shards), strict=True)

    def _value(self, row: ParamMapping) -> torch.Tensor:
        """Return this rank's shard of a parameter, with adapters merged in."""
        return self.merged[row.mcore_name]() if row.mcore_name in self.merged else self.parameters[row.mcore_name].detach()

    def _gather(self, bucket: list[ParamMapping]) -> dict[str, list[torch.Tensor]]:
        """Return the shards of each parameter in the bucket.

        The tensor-parallel rank varies fastest. A replicated parameter has a single shard.
        """
        owner, num_expert_shards = self.placement.owner_stage(bucket[0]), self.placement.num_expert_shards(bucket[0])
        is_cut = bucket[0].shard_dim is not None or num_expert_shards > 1
        copies = self.placement.tp * num_expert_shards if is_cut else 1
        if self.placement.pp == 1 and copies == 1:
            return {row.mcore_name: [self._value(row)] for row in bucket}
        sizes = [self.shapes[row.mcore_name].numel() for row in bucket]
        flat = torch.empty(copies, sum(sizes), dtype=self.dtype, device=self.device)
        if owner == self.placement.pp_rank:
            local = torch.cat([self._value(row).flatten() for row in bucket])
            if copies > 1:
                group = self.placement.tp_group if num_expert_shards == 1 else self.placement.tp_ep_group
                dist.all_gather(list(flat.unbind(0)), local, group=group)
            else:
                flat[0] = local
        if self.placement.pp > 1:
            dist.broadcast(flat, src=dist.get_process_group_ranks(self.placement.pp_group)[owner], group=self.placement.pp_group)
        pieces = zip(bucket, flat.split(sizes, 1), strict=True)
        return {row.mcore_name: [piece.view(self.shapes[row.mcore_name]) for piece in part.unbind(0)] for row, part in pieces}

    def _join_experts(self, row: ParamMapping, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensor-parallel shards of all experts, in tensor-parallel rank order."""
        tp = self.placement.tp
        if row.expert_dim is None or self.placement.ep == 1:
            return shards
        return [torch.cat(shards[tp_rank::tp], row.expert_dim) for tp_rank in range(tp)]


def _buckets(rows: list[ParamMapping], shapes: dict[str, torch.Size], placement: ShardLocation, max_numel: int) -> list[list[ParamMapping]]:
    """Group the mappings into buckets with at most `max_numel` elements on this rank.

    Experts of other ranks count as well, because they are gathered on this rank.
    All parameters of a bucket have the same owner stage, are either all sharded or all replicated,
    and have the same number of shards along the experts.
    """
    buckets: list[list[ParamMapping]] = []
    kinds: dict[tuple[int, bool, int], tuple[list[ParamMapping], int]] = {}
    for row in rows:
        kind = (placement.owner_stage(row), row.shard_dim is not None, placement.num_expert_shards(row))
        bucket, numel = kinds.get(kind, ([], 0))
        added = shapes[row.mcore_name].numel() * placement.num_expert_shards(row)
        if bucket and numel + added > max_numel:
            buckets.append(bucket)
            bucket, numel = [], 0
        bucket.append(row)
        kinds[kind] = (bucket, numel + added)
    return buckets + [bucket for bucket, _ in kinds.values()]
