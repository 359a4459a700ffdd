"""Weights in and out of a live Megatron model through the table: Hugging Face tensors in, a stream of them out in bounded memory."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from megatron_rl.models.name_mapping import ParamMapping, Tensors


@dataclass(slots=True, frozen=True)
class ShardLocation:
    """Where this process stands among those that hold the model."""

    tp_rank: int
    tp_group: dist.ProcessGroup
    pp_rank: int
    pp_group: dist.ProcessGroup
    chunks: int
    """Chunks of the model on each stage: layers go round the stages chunk by chunk (Megatron's interleaved pipeline)."""
    layers_per_chunk: int
    fused_norms: bool = False
    """Whether norms are spelled as Transformer Engine does (Row.fused_norm)."""

    @property
    def tp(self) -> int:
        return self.tp_group.size()

    @property
    def pp(self) -> int:
        return self.pp_group.size()

    def owner_stage(self, row: ParamMapping) -> int:
        """The pipeline stage that holds a row of the table."""
        return self._place(row)[0]

    def local_name(self, row: ParamMapping) -> str:
        """The parameter's name in its stage's list of chunks: `1.language...`; layers count from the chunk's first."""
        _, chunk = self._place(row)
        name = row.fused_norm if self.fused_norms and row.fused_norm else row.mcore_name
        if ":" in row.stage:
            layer = _layer(row)
            name = name.replace(f".layers.{layer}.", f".layers.{layer % self.layers_per_chunk}.", 1)
        return f"{chunk}.{name}"

    def _place(self, row: ParamMapping) -> tuple[int, int]:
        """The pipeline stage that holds a row, and the chunk on it."""
        if ":" not in row.stage:
            return {"first": (0, 0), "last": (self.pp - 1, self.chunks - 1)}[row.stage]
        chunk, stage = divmod(_layer(row) // self.layers_per_chunk, self.pp)
        return stage, chunk


def _layer(row: ParamMapping) -> int:
    return int(row.stage.removeprefix("layer:"))


def load_hf(chunks: nn.ModuleList, rows: list[ParamMapping], placement: ShardLocation, read_tensor: Callable[[str], torch.Tensor]) -> None:
    """Fill this rank's parameters; `read_tensor` gives a whole Hugging Face tensor by its name in the table, of a source proven complete.

    Adapters and a value head are no part of the table.
    """
    base = {name: parameter for name, parameter in chunks.named_parameters() if not (is_adapter(name) or is_of_value_head(name))}
    fill_parameters(base, rows, placement, lambda row, _shape: tuple(map(read_tensor, row.hf_names)))


def is_adapter(name: str) -> bool:
    """Whether a parameter, or a key of a distributed checkpoint, is a LoRA adapter's (weights/formats/peft.py)."""
    return ".lora_" in name


def is_of_output_layer(row: ParamMapping) -> bool:
    """Whether a row is of the layer that gives logits, which a critic lacks."""
    return row.mcore_name.startswith("language.output_layer.")


def is_of_value_head(name: str) -> bool:
    """Whether a parameter, or a key of a distributed checkpoint, is a critic's value head's (policy/value_head.py)."""
    return "value_head." in name


def fill_parameters(
    parameters: dict[str, nn.Parameter],
    rows: list[ParamMapping],
    placement: ShardLocation,
    tensors: Callable[[ParamMapping, torch.Size], Tensors],
) -> None:
    """Give every one of these parameters its value. `tensors` gives a row's full HF tensors; it is told the size of the whole parameter.

    Raises ValueError where the shapes differ.
    """
    left = dict(parameters)
    for row in _own_rows(rows, placement, parameters):
        parameter = left.pop(placement.local_name(row))
        whole = [size * placement.tp if dim == row.shard_dim else size for dim, size in enumerate(parameter.shape)]
        value = row.to_mcore(tensors(row, torch.Size(whole)), placement.tp_rank, placement.tp)
        if value.shape != parameter.shape:
            shapes = f"shape {tuple(value.shape)} after conversion, but {row.mcore_name} has {tuple(parameter.shape)}"
            raise ValueError(f"{', '.join(row.hf_names)}: {shapes}")
        with torch.no_grad():
            parameter.copy_(value)
        # Megatron's own initialization, which is skipped, would say so; the gradient norm counts unmarked parameters as copies.
        parameter.tensor_model_parallel = row.shard_dim is not None
    assert not left, f"parameters in no row of the table: {sorted(left)}"


def _own_rows(rows: list[ParamMapping], placement: ShardLocation, parameters: dict[str, nn.Parameter]) -> Iterator[ParamMapping]:
    """The rows whose parameter lies on this stage (tied embeddings on one stage have no second copy)."""
    for row in rows:
        if placement.owner_stage(row) == placement.pp_rank and (row.is_exported or placement.local_name(row) in parameters):
            yield row


class HfWeightIterator:
    """A fixed plan for streaming a live model out; every rank iterates together and every rank receives the full tensors.

    Rows are gathered in buckets: one all-gather over tensor-parallel ranks and one broadcast from the owning stage a bucket.
    """

    def __init__(
        self, chunks: nn.ModuleList, rows: list[ParamMapping], placement: ShardLocation, *,
        bucket_bytes: int, merged: Mapping[str, Callable[[], torch.Tensor]] | None = None,
    ) -> None:  # fmt: skip
        """`merged`: for parameters that leave in another form than they are stored (adapters merged in), by local name, their makers."""
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
        """Yield (hf_name, full tensor) in a fixed order. A tensor may share memory with the model: use it before the next update."""
        for bucket in self.buckets:
            shards_by_row = self._gather(bucket)
            for row in bucket:
                yield from zip(row.hf_names, row.to_hf(shards_by_row[row.mcore_name]), strict=True)

    def _value(self, row: ParamMapping) -> torch.Tensor:
        """This rank's shard of a row's parameter."""
        return self.merged[row.mcore_name]() if row.mcore_name in self.merged else self.parameters[row.mcore_name].detach()

    def _gather(self, bucket: list[ParamMapping]) -> dict[str, list[torch.Tensor]]:
        """Every tensor-parallel shard of each row of the bucket, in rank order (replicated rows: one)."""
        owner = self.placement.owner_stage(bucket[0])
        is_cut = bucket[0].shard_dim is not None
        copies = self.placement.tp if is_cut else 1
        if self.placement.pp == 1 and copies == 1:
            return {row.mcore_name: [self._value(row)] for row in bucket}
        sizes = [self.shapes[row.mcore_name].numel() for row in bucket]
        flat = torch.empty(copies, sum(sizes), dtype=self.dtype, device=self.device)
        if owner == self.placement.pp_rank:
            local = torch.cat([self._value(row).flatten() for row in bucket])
            if copies > 1:
                dist.all_gather(list(flat.unbind(0)), local, group=self.placement.tp_group)
            else:
                flat[0] = local
        if self.placement.pp > 1:
            dist.broadcast(flat, src=dist.get_process_group_ranks(self.placement.pp_group)[owner], group=self.placement.pp_group)
        pieces = zip(bucket, flat.split(sizes, 1), strict=True)
        return {row.mcore_name: [piece.view(self.shapes[row.mcore_name]) for piece in part.unbind(0)] for row, part in pieces}


def _buckets(rows: list[ParamMapping], shapes: dict[str, torch.Size], placement: ShardLocation, max_numel: int) -> list[list[ParamMapping]]:
    """Cut the rows into runs of one owner and one kind (cut or replicated) that hold at most max_numel numbers of this rank."""
    buckets: list[list[ParamMapping]] = []
    kinds: dict[tuple[int, bool], tuple[list[ParamMapping], int]] = {}
    for row in rows:
        kind = (placement.owner_stage(row), row.shard_dim is not None)
        bucket, numel = kinds.get(kind, ([], 0))
        if bucket and numel + shapes[row.mcore_name].numel() > max_numel:
            buckets.append(bucket)
            bucket, numel = [], 0
        bucket.append(row)
        kinds[kind] = (bucket, numel + shapes[row.mcore_name].numel())
    return buckets + [bucket for bucket, _ in kinds.values()]
