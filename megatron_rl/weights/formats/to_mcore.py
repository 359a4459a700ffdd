"""Converts a checkpoint to Megatron's distributed format and verifies the result.

Conversion handles one tensor at a time. Verification ensures that every source tensor is used
exactly once.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_rl.models.name_mapping import ParamMapping, Tensors
from megatron_rl.weights.formats.checkpoint_source import TensorSource, TensorSpec, check_names
from megatron_rl.weights.formats.tensor_files import prefetch
from megatron_rl.weights.formats.torch_dist import McoreTensors, TorchDistWriter


class McoreImport:
    """Conversion of one checkpoint to Megatron's distributed format.

    Name mappings, output specs and output size are determined from headers, before any tensor is
    read.
    """

    def __init__(self, source: TensorSource, rows: list[ParamMapping], *, dtype: torch.dtype | None = None) -> None:
        """Determine the specs of the output.

        `source` must already have been checked against the model. With dtype=None, each tensor
        keeps its stored dtype. Raises ValueError if the tensors of one parameter have different
        dtypes.
        """
        self.source, self.dtype = source, dtype
        self.rows = [row for row in rows if row.is_exported]
        self.target_specs = {row.checkpoint_key: self._target_spec(row) for row in self.rows}

    def _target_spec(self, row: ParamMapping) -> TensorSpec:
        specs = [self.source.specs[name] for name in row.hf_names]
        tensors = tuple(torch.empty(spec.shape, dtype=self.dtype or spec.dtype, device="meta") for spec in specs)
        if len({tensor.dtype for tensor in tensors}) > 1:
            differ = ", ".join(f"{name} {spec}" for name, spec in zip(row.hf_names, specs, strict=True))
            raise ValueError(f"{row.checkpoint_key} is built from tensors of different types: {differ}; set --dtype")
        whole = row.to_mcore(tensors, 0, 1)
        return TensorSpec(whole.dtype, whole.shape)

    @property
    def num_bytes(self) -> int:
        """Total size of the output tensors in bytes, computed from the source's specs."""
        return sum(spec.shape.numel() * (self.dtype or spec.dtype).itemsize for spec in self.source.specs.values())

    def write(self, into: Path, *, tp: int, progress: Callable[[int], None]) -> None:
        """Write the checkpoint into an empty folder and verify it.

        `progress` is called with the size in bytes of each written tensor. Tensors are divided into
        chunks so that, with tensor-parallel size `tp`, each rank reads only its own data. The
        checkpoint can be loaded with any parallel layout. Raises OSError if writing fails (disk
        full) and ValueError if the input is damaged.
        """
        consumed: Counter[str] = Counter()
        with TorchDistWriter(into) as writer:
            for row, runs in zip(self.rows, prefetch(self._runs, self.rows), strict=True):
                writer.add(row.checkpoint_key, *runs, dim=row.shard_dim or 0, parts=num_chunks(row, tp))
                if has_extra_state(row):
                    writer.add_empty_object(f"{row.checkpoint_key.removesuffix('weight')}_extra_state/shard_0_1")
                consumed.update(row.hf_names)
                progress(self.target_specs[row.checkpoint_key].nbytes)
            writer.finish()
        wrong = sorted(name for name in self.source.specs.keys() | consumed.keys() if consumed[name] != 1)
        if wrong:
            makes = [row.checkpoint_key for row in self.rows if wrong[0] in row.hf_names]
            raise ValueError(
                f"{wrong[0]} was read {consumed[wrong[0]]} times (for {', '.join(makes) or 'no Megatron tensor'}) instead of once"
            )
        self._check_result(into)

    def _runs(self, row: ParamMapping) -> Tensors:
        return row.list_row_slices(tuple(tensor.to(self.dtype or tensor.dtype) for tensor in map(self.source.read, row.hf_names)))

    def _check_result(self, into: Path) -> None:
        result = McoreTensors(into, key="--out")
        check_names(result.specs, self.target_specs, source=str(into), target="the name mapping")
        for key, spec in self.target_specs.items():
            if result.specs[key] != spec:
                raise ValueError(f"{into}: {key} was written as {result.specs[key]}, expected {spec}")
        num_bytes = sum(spec.nbytes for spec in result.specs.values())
        if num_bytes != self.num_bytes:
            raise ValueError(f"{into}: {num_bytes} bytes of tensors were written, expected {self.num_bytes}")


def num_chunks(row: ParamMapping, tp: int) -> int:
    """Return the number of chunks into which a stored parameter is divided.

    Megatron shards a parameter equally across ranks. For a fused gate/up projection, gate and up
    are sharded separately (megatron-core 0.16.1, transformer/mlp.py, apply_swiglu_sharded_factory).
    """
    if row.shard_dim is None:
        return 1
    return tp * len(row.hf_names) if row.fuse_shards else tp


def has_extra_state(row: ParamMapping) -> bool:
    """Return True if Megatron expects an `_extra_state` entry for the layer of this parameter.

    Megatron's sharded_state_dict contains an `_extra_state` entry for each linear layer of the
    decoder (megatron-core 0.16.1, tensor_parallel/layers.py, get_extra_state).
    """
    return ":" in row.stage and row.shard_dim is not None and row.checkpoint_key.endswith("weight")
