"""Qwen3.5: layers, fields of the config, and the layouts of gated attention and delta nets."""

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5ForConditionalGeneration

from megatron_rl.config import LoraSettings, ParallelSettings
from megatron_rl.models.adapter_mapping import adapter_table
from megatron_rl.models.hf_config import parse_spec, read_spec
from megatron_rl.models.known_models import load_known_spec
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.name_mapping import canonical_name
from megatron_rl.policy.gated_delta_net import delta_net_config
from megatron_rl.policy.lora import adapt_layers, adapted_delta_net, check_adapter_targets
from megatron_rl.policy.parallel import check_layout
from megatron_rl.weights.formats.checkpoint_source import describe_skipped
from megatron_rl.weights.formats.open_checkpoint import open_source
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint

ROPE = {
    "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10_000_000,
    "partial_rotary_factor": 0.25,
}  # fmt: skip
STORED = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_text", "hidden_size": 192, "intermediate_size": 160, "num_hidden_layers": 6, "num_attention_heads": 6,
        "num_key_value_heads": 3, "head_dim": 256, "vocab_size": 128, "full_attention_interval": 4, "attn_output_gate": True,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 10, "linear_num_key_heads": 3,
        "linear_num_value_heads": 6, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [], "rope_parameters": ROPE,
    },
    "vision_config": {"depth": 1, "hidden_size": 64, "num_heads": 4, "out_hidden_size": 192, "deepstack_visual_indexes": []},
}  # fmt: skip
"""Fields of a released config.json, with small sizes."""


def parse(**text: object) -> ModelSpec:
    return parse_spec({**STORED, "text_config": STORED["text_config"] | text}, folder="m", key="model.path")


def test_sizes_and_layers_are_those_of_transformers() -> None:
    """Linear layers and tensors are those of the model that transformers builds from the config; a
    quarter of a head is rotated.
    """
    spec = parse()
    with torch.device("meta"):
        tensors = Qwen3_5ForConditionalGeneration(deepcopy(spec.config)).state_dict()
    assert [spec.is_linear(layer) for layer in range(6)] == [True, True, True, False, True, True]
    assert spec.rotary_dim == 64 and spec.vision.num_deepstack_layers == 0
    assert {name for row in spec.param_mappings() for name in row.hf_names} == {canonical_name(name) for name in tensors}


@pytest.mark.parametrize(("size", "billions"), [("9B", 9), ("27B", 27)])
def test_released_sizes_are_read(size: str, billions: int) -> None:
    """The sizes of a released model give the number of parameters in its name, and every fourth
    layer has attention.
    """
    spec = load_known_spec(f"Qwen/Qwen3.5-{size}")
    assert sum(shape.numel() for shape in spec.shapes().values()) == pytest.approx(billions * 1e9, rel=0.06)
    assert [layer for layer in range(spec.num_layers) if not spec.is_linear(layer)] == list(range(3, spec.num_layers, 4))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ({"linear_num_key_heads": 0}, "linear_num_key_heads is 0, not a positive integer"),
        ({"linear_value_head_dim": -1}, "linear_value_head_dim is -1, not a positive integer"),
        ({"linear_num_value_heads": 4}, "linear_num_value_heads is 4, not a multiple of linear_num_key_heads, 3"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1, not at least 2"),
        ({"layer_types": ["linear_attention"] * 6}, "layer_types does not name 6 layers of the two types"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer"),
        ({"attn_output_gate": False}, "text_config.attn_output_gate is False, supported: True"),
        ({"output_gate_type": "sigmoid"}, "text_config.output_gate_type is sigmoid, supported: silu or swish"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.25, but text_config.partial_rotary_factor is 0.5"),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}, r"mrope_section is \[11, 11, 10\], with sum 32, not half of"),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": -0.25}}, "partial_rotary_factor is -0.25, not a positive number"),
        ({"layer_scale": True}, "text_config.layer_scale is True, an unknown field"),
    ],
)
def test_a_config_that_is_not_computed_is_refused(text: dict, said: str) -> None:
    """Invalid or unsupported settings are rejected in one line that names the key."""
    with pytest.raises(ValueError, match=rf"^model.path=m: config.json[^\n]*{said}[^\n]*$"):
        parse(**text)


def rows_by_head() -> dict[str, list[list[int]]]:
    """Return the rows of fused weights, by key head or key/value group, with their numbers in the
    concatenation of Hugging Face's tensors.
    """
    delta = {
        "q": range(24), "k": range(24, 48), "v": range(48, 108), "z": range(108, 168), "b": range(168, 174), "a": range(174, 180)
    }  # fmt: skip
    heads = [[row for part in delta.values() for row in part[head * len(part) // 3 : (head + 1) * len(part) // 3]] for head in range(3)]
    gated = [
        [row for what in (0, 256) for head in (2 * group, 2 * group + 1) for row in range(512 * head + what, 512 * head + what + 256)]
        + list(range(3072 + 256 * group, 3328 + 256 * group)) + list(range(3840 + 256 * group, 4096 + 256 * group))
        for group in range(3)
    ]  # fmt: skip
    return {
        "0.self_attention.in_proj_by_head.weight": heads,
        "0.self_attention.conv1d_by_head.weight": [[row for row in head if row < 108] for head in heads],
        "3.self_attention.linear_qkv.weight": gated,
    }  # fmt: skip


@pytest.mark.parametrize("tp", [1, 3])
def test_a_rank_has_its_heads_and_gates(tp: int) -> None:
    """Shards of all parameters contain the rows of the rank's heads, found by their numbers in
    Hugging Face's tensors; converting the shards back restores the tensors.
    """
    spec = parse()
    shapes, rows = spec.shapes(), {row.mcore_name.split(".layers.")[-1]: row for row in spec.param_mappings()}
    for name, by_head in rows_by_head().items():
        tensors, start = [], 0
        for hf_name in rows[name].hf_names:
            stop = start + shapes[hf_name][0]
            tensors.append(torch.arange(start, stop)[:, None].expand(-1, 2).contiguous())
            start = stop
        shards = [rows[name].to_mcore(tuple(tensors), rank, tp) for rank in range(tp)]
        for rank, shard in enumerate(shards):
            assert shard[:, 0].tolist() == [row for head in by_head[rank * 3 // tp : (rank + 1) * 3 // tp] for row in head], name
        assert all(torch.equal(one, other) for one, other in zip(rows[name].to_hf(shards), tensors, strict=True))
        assert torch.equal(torch.cat(rows[name].list_row_slices(tuple(tensors))), rows[name].to_mcore(tuple(tensors), 0, 1))


@pytest.mark.parametrize("tp", [1, 3])
def test_a_ranks_adapters_have_the_order_of_its_weights(tp: int) -> None:
    """The B matrices of a fused layer's projections, sharded and then fused by the LoRA layer, have
    the order of the rows of the layer's weight.
    """
    spec, lora = parse(), LoraSettings(rank=1, targets=["attention"])
    check_adapter_targets(LoraSettings(rank=4), spec, key="lora.targets")
    config = SimpleNamespace(
        tensor_model_parallel_size=tp, kv_channels=256, num_query_groups=3, num_attention_heads=6, ffn_hidden_size=160,
        attention_output_gate=True, **delta_net_config(spec),
    )  # fmt: skip
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    adapt_layers(layer, lora, config)
    layers = {
        "0.self_attention.in_proj_by_head": adapted_delta_net(lora, config)["in_proj"].keywords,
        "3.self_attention.linear_qkv": layer.submodules.self_attention.submodules.linear_qkv.params,
    }
    rows = {row.mcore_name.split(".layers.")[-1]: row for row in adapter_table(spec, targets=lora.targets, vision_names=[])}
    assert len(rows) == 2 * (5 * 5 + 4)
    for name, params in layers.items():
        sizes = {part: tp * size for part, size in params["num_outputs"].items()}
        numbers = torch.arange(sum(sizes.values())).split(list(sizes.values()))
        mappings = [rows[f"{name}.adapter.lora_b.{part}"] for part in sizes]
        shards = [[row.to_mcore((tensor,), rank, tp) for row, tensor in zip(mappings, numbers, strict=True)] for rank in range(tp)]
        by_head = rows_by_head()[f"{name}.weight"]
        assert sum(map(len, by_head)) == sum(sizes.values())
        for rank, mine in enumerate(shards):
            assert [len(shard) for shard in mine] == list(params["num_outputs"].values())
            assert params["fuse"](tuple(mine)).tolist() == [row for head in by_head[rank * 3 // tp : (rank + 1) * 3 // tp] for row in head]
        for row, *parts, tensor in zip(mappings, *shards, numbers, strict=True):
            assert torch.equal(row.to_hf(parts)[0], tensor)


def test_multi_token_prediction_is_skipped(tmp_path: Path) -> None:
    """The tensors mtp.* of a released checkpoint are skipped with a message, as in transformers;
    other unknown tensors are rejected.
    """
    make_checkpoint(tmp_path / "m", family="qwen3_5", layers=3)
    path, spec = tmp_path / "m" / "model.safetensors", read_spec(tmp_path / "m")
    tensors = load_file(path)
    save_file({**tensors, "mtp.fc.weight": torch.ones(2)}, path, metadata={"format": "pt"})
    source = open_source(tmp_path / "m", spec, key="model.path")
    assert describe_skipped(source) == "skipped: 1 stored tensors that belong to multi-token prediction (mtp.fc.weight)"
    assert source.specs.keys() == spec.shapes().keys()
    save_file({**tensors, "mtp_head.weight": torch.ones(2)}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unknown: mtp_head.weight"):
        open_source(tmp_path / "m", spec, key="model.path")


def test_layouts_that_cut_a_head_are_refused() -> None:
    """Tensor parallelism must divide the key heads of the delta nets."""
    spec = parse(num_attention_heads=4, num_key_value_heads=4)
    check_layout(ParallelSettings(tp=1), spec, 1)
    with pytest.raises(ValueError, match=r"^parallel.tp=2: does not divide the model's 3 key heads of each delta net; use one of 1$"):
        check_layout(ParallelSettings(tp=2), spec, 2)
