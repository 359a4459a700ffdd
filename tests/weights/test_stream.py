"""Export of HF weights from a live model: the exported tensors equal the loaded ones for every
bucket size."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_rl.models.decoder import qwen2_layer_mappings as layer_rows
from megatron_rl.models.name_mapping import AttentionHeads, ParamMapping, name_table
from megatron_rl.weights.stream import HfWeightIterator, ShardLocation, _buckets, load_hf

WIDTH, FFN, VOCABULARY = 8, 12, 20
ROWS = name_table(
    num_layers=4,
    heads=AttentionHeads(num_query_heads=4, num_kv_heads=2, head_dim=2),
    tie_word_embeddings=False,
    vocab_size=VOCABULARY,
    layer_mappings=layer_rows,
    vision_names=["merger.ln_q.weight", "merger.mlp.0.weight"],
)
SHAPES = {
    "embed_tokens": (VOCABULARY, WIDTH), "lm_head": (VOCABULARY, WIDTH), "q_proj": (8, WIDTH), "k_proj": (4, WIDTH), "v_proj": (4, WIDTH),
    "o_proj": (WIDTH, 8), "gate_proj": (FFN, WIDTH), "up_proj": (FFN, WIDTH), "down_proj": (WIDTH, FFN), "0": (WIDTH, WIDTH),
}  # fmt: skip
"""Shape of a Hugging Face layer's weight by the last part of its name; norms have one dimension."""


def hf_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name in (name for row in ROWS for name in row.hf_names):
        layer, kind = name.split(".")[-2:]
        shape = SHAPES.get(layer, (WIDTH,))
        tensors[name] = torch.randn(shape if kind == "weight" else shape[:1], generator=generator)
    return tensors


def chunk_of(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """Build a model chunk with all parameters of the table, initialized to zero."""
    chunk = nn.Module()
    for row in ROWS:
        *parents, own = row.mcore_name.split(".")
        module = chunk
        for parent in parents:
            if parent not in module._modules:
                module.add_module(parent, nn.Module())
            module = module._modules[parent]
        shape = row.to_mcore(tuple(tensors[name] for name in row.hf_names), 0, 1).shape
        module.register_parameter(own, nn.Parameter(torch.zeros(shape)))
    return chunk


@pytest.fixture
def alone() -> Iterator[ShardLocation]:
    """Return the shard location in a world of one process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    group = dist.group.WORLD
    yield ShardLocation(0, group, 0, group, chunks=1, layers_per_chunk=4)
    dist.destroy_process_group()


@pytest.mark.parametrize("bucket_bytes", [0, 300, 1000, 1 << 20])
def test_what_is_exported_is_what_was_loaded(bucket_bytes: int, alone: ShardLocation) -> None:
    """The exported tensors equal the loaded tensors.

    Bucket sizes give one bucket per kind, several buckets, or one bucket per parameter.
    """
    tensors = hf_tensors()
    chunks = nn.ModuleList([chunk_of(tensors)])
    load_hf(chunks, ROWS, alone, tensors.__getitem__)
    export = HfWeightIterator(chunks, ROWS, alone, bucket_bytes=bucket_bytes)
    assert {0: len(ROWS), 1 << 20: 2}.get(bucket_bytes, len(export.buckets)) == len(export.buckets)
    assert (2 < len(export.buckets) < len(ROWS)) == (bucket_bytes in (300, 1000))
    for _ in range(2):
        exported = list(export.tensors())
        assert sorted(name for name, _ in exported) == sorted(tensors)
        assert [name for name, tensor in exported if not torch.equal(tensor, tensors[name])] == []


@pytest.mark.parametrize(("stages", "chunks", "layers"), [(1, 1, 4), (2, 1, 3), (2, 2, 1), (2, 2, 2), (3, 2, 2), (2, 3, 1)])
def test_layers_go_round_the_stages_chunk_by_chunk(stages: int, chunks: int, layers: int) -> None:
    """Layers are assigned as Megatron does (arXiv 2104.04473, 2.2): from the first layer on, each
    stage gets one chunk in turn."""
    group = SimpleNamespace(size=lambda: stages)
    placement = ShardLocation(0, SimpleNamespace(size=lambda: 1), 0, group, chunks=chunks, layers_per_chunk=layers)
    walked = [(stage, chunk, layer) for chunk in range(chunks) for stage in range(stages) for layer in range(layers)]
    for number, (stage, chunk, layer) in enumerate(walked):
        row = ParamMapping(f"language.decoder.layers.{number}.mlp.weight", ("x",), f"layer:{number}")
        assert (placement.owner_stage(row), placement.local_name(row)) == (stage, f"{chunk}.language.decoder.layers.{layer}.mlp.weight")
    ends = [ParamMapping("language.embedding", ("x",), "first"), ParamMapping("language.output_layer", ("y",), "last")]
    assert [(placement.owner_stage(row), placement.local_name(row)) for row in ends] == [
        (0, "0.language.embedding"), (stages - 1, f"{chunks - 1}.language.output_layer")
    ]  # fmt: skip


@pytest.mark.parametrize("max_numel", [0, 50, 100, 500, 1 << 20])
def test_buckets_hold_every_row_once_and_no_more_than_they_may(max_numel: int) -> None:
    """Buckets contain every row once, keep the row order per kind, and are closed only if the next
    row does not fit. There are two stages with two chunks each; a row larger than a bucket has its
    own bucket."""
    placement = ShardLocation(0, SimpleNamespace(size=lambda: 2), 0, SimpleNamespace(size=lambda: 2), chunks=2, layers_per_chunk=1)
    tensors = hf_tensors()
    shapes = {row.mcore_name: row.to_mcore(tuple(tensors[name] for name in row.hf_names), 0, 2).shape for row in ROWS}

    def numel(*rows: ParamMapping) -> int:
        return sum(shapes[row.mcore_name].numel() for row in rows)

    def kind(row: ParamMapping) -> tuple[int, bool]:
        return placement.owner_stage(row), row.shard_dim is not None

    buckets = _buckets(ROWS, shapes, placement, max_numel)
    assert sorted(row.mcore_name for bucket in buckets for row in bucket) == sorted(row.mcore_name for row in ROWS)
    assert all(len({kind(row) for row in bucket}) == 1 for bucket in buckets)
    assert all(len(bucket) == 1 or numel(*bucket) <= max_numel for bucket in buckets)
    for each in {kind(row) for row in ROWS}:
        mine = [bucket for bucket in buckets if kind(bucket[0]) == each]
        assert [row for bucket in mine for row in bucket] == [row for row in ROWS if kind(row) == each]
        assert all(numel(*one, other[0]) > max_numel for one, other in itertools.pairwise(mine)), "a bucket was closed too early"
