"""The mapping between Hugging Face and Megatron weights, against layouts built by hand."""

import pytest
import torch

from megatron_rl.models.decoder import qwen2_layer_mappings
from megatron_rl.models.name_mapping import AttentionHeads, ParamMapping, canonical_name, fuse_qkv, name_table, split_qkv

HEADS = AttentionHeads(num_query_heads=8, num_kv_heads=4, head_dim=2)


def rows_of_a_layer() -> dict[str, object]:
    rows = name_table(
        num_layers=1,
        heads=HEADS,
        tie_word_embeddings=False,
        vocab_size=10,
        layer_mappings=qwen2_layer_mappings,
        vision_names=["merger.ln_q.weight"],
    )
    return {row.mcore_name: row for row in rows}


def test_qkv_holds_one_block_a_key_value_group() -> None:
    """The fused QKV weight has one block per key/value group.

    With two query heads per group its rows are q0 q1 k0 v0 q2 q3 k1 v1 ..., two rows per head.
    """
    q, k, v = (torch.arange(rows, dtype=torch.float)[:, None] + base for rows, base in ((16, 0), (8, 100), (8, 200)))
    fused = fuse_qkv((q, k, v), HEADS)
    assert fused[:8, 0].tolist() == [0, 1, 2, 3, 100, 101, 200, 201]
    assert fused[8:16, 0].tolist() == [4, 5, 6, 7, 102, 103, 202, 203]
    assert all(torch.equal(part, whole) for part, whole in zip(split_qkv(fused, HEADS), (q, k, v), strict=True))


@pytest.mark.known_failure("sharded-qkv-order")
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", ["self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias", "self_attention.linear_proj.weight",
                                  "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"])  # fmt: skip
def test_every_row_comes_back_from_its_shards(name: str, tp: int) -> None:
    """Splitting each kind of weight over tensor-parallel ranks and converting it back restores the
    tensors."""
    row = rows_of_a_layer()[f"language.decoder.layers.0.{name}"]
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": 16, "k": 8, "v": 8, "o": 16, "gate": 12, "up": 12, "down": 16}
    tensors = []
    for hf in row.hf_names:
        rows = shapes[hf.split(".")[-2].removesuffix("_proj")]
        tensors.append(torch.randn(rows, *([] if hf.endswith("bias") else [16]), generator=generator))
    shards = [row.to_mcore(tuple(tensors), rank, tp) for rank in range(tp)]
    assert len({tuple(shard.shape) for shard in shards}) == 1
    assert sum(shard.numel() for shard in shards) == sum(tensor.numel() for tensor in tensors)
    assert all(torch.equal(back, tensor) for back, tensor in zip(row.to_hf(shards), tensors, strict=True))


@pytest.mark.parametrize(
    "heads",
    [HEADS, AttentionHeads(num_query_heads=6, num_kv_heads=1, head_dim=2), AttentionHeads(num_query_heads=3, num_kv_heads=3, head_dim=2)],
)
@pytest.mark.parametrize("name", ["linear_qkv.weight", "linear_qkv.bias", "linear_proj.weight", "linear_fc1.weight"])
def test_runs_are_the_fused_tensor_without_a_copy(name: str, heads: AttentionHeads) -> None:
    """The row slices of a fused weight concatenate to the fused tensor and share memory with the
    originals."""
    (row,) = (row for row in qwen2_layer_mappings(0, heads) if row.mcore_name.endswith(name))
    sizes = {
        "q": heads.num_query_heads * heads.head_dim,
        "k": heads.num_kv_heads * heads.head_dim,
        "v": heads.num_kv_heads * heads.head_dim,
        "o": 5,
        "gate": 7,
        "up": 7,
    }
    tensors = tuple(torch.rand(sizes[hf.split(".")[-2].removesuffix("_proj")], *[4][: hf.endswith("weight")]) for hf in row.hf_names)
    runs = row.list_row_slices(tensors)
    assert torch.equal(torch.cat(runs), row.to_mcore(tensors, 0, 1))
    assert {run.untyped_storage().data_ptr() for run in runs} == {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert len(runs) == {"linear_qkv": 3 * heads.num_kv_heads, "linear_proj": 1, "linear_fc1": 2}[name.split(".")[0]]


def test_a_fusion_that_loses_rows_has_no_runs() -> None:
    """Listing the row slices of a fusion that does not contain every row exactly once raises."""
    row = ParamMapping("name", ("a", "b"), "first", fuse=lambda tensors: torch.cat((tensors[0], tensors[0])))
    with pytest.raises(AssertionError, match="name does not contain every row exactly once"):
        row.list_row_slices((torch.zeros(2), torch.zeros(2)))


def test_gate_and_up_of_a_rank_stand_together() -> None:
    """The shard of linear_fc1 has the rank's gate rows followed by its up rows."""
    row = rows_of_a_layer()["language.decoder.layers.0.mlp.linear_fc1.weight"]
    gate, up = torch.arange(4.0)[:, None], torch.arange(4.0)[:, None] + 10
    assert row.to_mcore((gate, up), 1, 2)[:, 0].tolist() == [2, 3, 12, 13]


def test_the_table_names_everything_once() -> None:
    """Every Hugging Face name and every Megatron name occurs once in the table.

    With tied embeddings lm_head is not exported.
    """
    rows = name_table(
        num_layers=3, heads=HEADS, tie_word_embeddings=False, vocab_size=10, layer_mappings=qwen2_layer_mappings, vision_names=["a", "b"]
    )
    hf = [name for row in rows for name in row.hf_names]
    assert len(set(hf)) == len(hf) == 2 + 1 + 3 * 12 + 1 + 1
    assert len({row.mcore_name for row in rows}) == len(rows)
    tied = name_table(
        num_layers=1, heads=HEADS, tie_word_embeddings=True, vocab_size=10, layer_mappings=qwen2_layer_mappings, vision_names=[]
    )
    assert "lm_head.weight" not in {name for row in tied if row.is_exported for name in row.hf_names}


@pytest.mark.known_failure("tensor-names-renamed")
def test_both_spellings_of_names_are_one() -> None:
    """Old and new Hugging Face names map to the same canonical name."""
    assert canonical_name("model.language_model.layers.0.input_layernorm.weight") == "model.layers.0.input_layernorm.weight"
    assert canonical_name("model.visual.merger.ln_q.weight") == "visual.merger.ln_q.weight"
    assert canonical_name("lm_head.weight") == "lm_head.weight"
