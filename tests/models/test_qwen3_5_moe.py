"""Qwen3.5 with experts: layers, fields of the config, and the layout of experts and of the shared
expert.
"""

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, Qwen3_5MoeForConditionalGeneration

from megatron_rl.config import LoraSettings, ParallelSettings
from megatron_rl.models.adapter_mapping import EXPERT_PARAMETERS, adapter_table
from megatron_rl.models.decoder import qwen3_5_moe_layer_mappings
from megatron_rl.models.hf_config import parse_spec, read_spec
from megatron_rl.models.known_models import load_known_spec, make_released_config
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.name_mapping import AttentionHeads, canonical_name, nested_name
from megatron_rl.policy.lora import check_adapter_targets
from megatron_rl.policy.parallel import check_layout
from megatron_rl.weights.formats.merge_lora import MergedTensors
from megatron_rl.weights.formats.open_checkpoint import open_source
from megatron_rl.weights.formats.peft import make_peft_config
from megatron_rl.weights.formats.safetensors_folder import HfTensors
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.support.hf_reference import write_adapter

LORA = LoraSettings(rank=8, targets=["attention", "mlp", "vision", "projector"])


def parse(**text: object) -> ModelSpec:
    """Return the model of a released config with three layers and four experts."""
    stored = deepcopy(make_released_config("35B-A3B", family="qwen3_5_moe"))
    layers = ["linear_attention", "full_attention", "linear_attention"]
    stored["text_config"] |= {"num_hidden_layers": 3, "layer_types": layers, "num_experts": 4, "num_experts_per_tok": 2, **text}
    return parse_spec(stored, folder="m", key="model.path")


def test_sizes_and_layers_are_those_of_transformers() -> None:
    """Tensors, and the shapes of experts in checkpoints, are those of the model that transformers
    builds from the config; all layers have experts, and each has a shared expert.
    """
    spec = parse(shared_expert_intermediate_size=384)
    with torch.device("meta"):
        tensors = Qwen3_5MoeForConditionalGeneration(deepcopy(spec.config)).state_dict()
    assert spec.experts is not None and spec.experts.sparse_layers == (True,) * 3
    assert (spec.experts.ffn_size, spec.experts.shared_ffn_size, spec.ffn_size) == (512, 384, 384)
    assert [spec.is_linear(layer) for layer in range(3)] == [True, False, True]
    assert spec.shapes() == {canonical_name(name): tensor.shape for name, tensor in tensors.items()}
    assert {name for row in spec.param_mappings() for name in row.hf_names} == spec.shapes().keys()


@pytest.mark.parametrize(("size", "billions", "active"), [("35B-A3B", 35, 3), ("397B-A17B", 397, 17)])
def test_released_sizes_are_read(size: str, billions: int, active: int) -> None:
    """The sizes of a released model give the numbers of all and of active parameters in its name."""
    spec = load_known_spec(f"Qwen/Qwen3.5-{size}")
    assert spec.experts is not None
    shapes = {name: shape.numel() for name, shape in spec.shapes().items() if not name.startswith("visual.")}
    experts = sum(count for name, count in shapes.items() if ".mlp.experts." in name)
    assert sum(shapes.values()) == pytest.approx(billions * 1e9, rel=0.02)
    unused = experts * (1 - spec.experts.top_k / spec.experts.num_experts)
    assert sum(shapes.values()) - unused == pytest.approx(active * 1e9, rel=0.16)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ({"num_experts": 0}, "num_experts is 0, not a positive integer"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok is 1, not between 2 and num_experts, 4"),
        ({"moe_intermediate_size": 514}, "moe_intermediate_size is 514, not a multiple of 8"),
        ({"moe_intermediate_size": 1024}, "moe_intermediate_size is 1024 and hidden_size 2048, .* no clear orientation"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0, not a positive integer"),
        ({"norm_topk_prob": False}, "text_config.norm_topk_prob is False, supported: True"),
        ({"decoder_sparse_step": 2}, "text_config.decoder_sparse_step is 2, supported: 1"),
        ({"mlp_only_layers": [1]}, r"text_config.mlp_only_layers is \[1\], supported: \[\]"),
        ({"num_shared_experts": 1}, "text_config.num_shared_experts is 1, an unknown field"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads is 0, not a positive integer"),
    ],
)
def test_a_config_that_is_not_computed_is_refused(text: dict, said: str) -> None:
    """Invalid or unsupported settings are rejected in one line that names the key."""
    with pytest.raises(ValueError, match=rf"^model.path=m: config.json[^\n]*{said}[^\n]*$"):
        parse(**text)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_a_rank_has_its_columns_of_every_expert(tp: int) -> None:
    """The shards are the rank's columns of gate and up, and rows of down, of every expert and of
    the shared expert, cut by hand; converting the shards back restores the tensors.
    """
    mappings = qwen3_5_moe_layer_mappings(0, AttentionHeads(2, 2, 4), is_sparse=True)
    rows = {row.mcore_name.rpartition(".mlp.")[2]: row for row in mappings if ".mlp." in row.mcore_name}
    assert rows.keys() == {
        "router.weight", "experts.linear_fc1", "experts.linear_fc2",
        "shared_experts.linear_fc1.weight", "shared_experts.linear_fc2.weight", "shared_experts.gate_weight",
    }  # fmt: skip
    gate, up, down = torch.randn(5, 6, 4), torch.randn(5, 6, 4), torch.randn(5, 4, 6)
    tensors = {
        "experts.linear_fc1": (torch.cat((gate, up), 1),), "experts.linear_fc2": (down,),
        "shared_experts.linear_fc1.weight": (gate[0], up[0]), "shared_experts.linear_fc2.weight": (down[0],),
    }  # fmt: skip
    shards = {name: [rows[name].to_mcore(whole, rank, tp) for rank in range(tp)] for name, whole in tensors.items()}
    for rank in range(tp):
        columns = slice(rank * 6 // tp, (rank + 1) * 6 // tp)
        both = torch.stack((gate[:, columns].mT, up[:, columns].mT), 2)
        assert torch.equal(shards["experts.linear_fc1"][rank], both)
        assert torch.equal(shards["experts.linear_fc2"][rank], down[:, :, columns].mT)
        assert torch.equal(shards["shared_experts.linear_fc1.weight"][rank], torch.cat((gate[0, columns], up[0, columns])))
        assert torch.equal(shards["shared_experts.linear_fc2.weight"][rank], down[0, :, columns])
    for name, whole in tensors.items():
        assert all(torch.equal(one, other) for one, other in zip(rows[name].to_hf(shards[name]), whole, strict=True)), name
    assert rows["shared_experts.gate_weight"].shard_dim is None and rows["shared_experts.linear_fc1.weight"].expert_dim is None


def test_layouts_that_do_not_fit_are_refused() -> None:
    """Tensor parallelism must divide the shared expert, and requires sequence parallelism."""
    check_layout(ParallelSettings(tp=2, sequence_parallel=True, ep=2), parse(), 4)
    with pytest.raises(ValueError, match=r"^parallel.tp=2: needs parallel.sequence_parallel=true, because the model has experts$"):
        check_layout(ParallelSettings(tp=2), parse(), 2)
    said = r"^parallel.tp=2: does not divide the model's 511 rows of each MLP \(shared_expert_intermediate_size\); use one of 1$"
    with pytest.raises(ValueError, match=said):
        check_layout(ParallelSettings(tp=2, sequence_parallel=True), parse(shared_expert_intermediate_size=511), 2)


def test_adapters_are_those_of_peft(tmp_path: Path) -> None:
    """PEFT's adapter has the tensors of the name mappings, for experts, shared experts and all
    other targets, and so has one with the modules and parameters that an exported adapter states. Merged
    weights equal those of PEFT's merge_and_unload.
    """
    make_checkpoint(tmp_path / "model", family="qwen3_5_moe", init="random")
    adapter, spec = write_adapter(tmp_path / "model", tmp_path / "adapter"), read_spec(tmp_path / "model")
    check_adapter_targets(LORA, spec, key="lora.targets")
    vision = [name.removeprefix("visual.") for name in spec.shapes() if name.startswith("visual.")]
    rows = adapter_table(spec, targets=LORA.targets, vision_names=vision)
    assert sorted(name for row in rows for name in row.hf_names) == sorted(HfTensors(adapter).specs)
    assert sum(".shared_expert." in row.hf_names[0] for row in rows) == 4 * 3 * 2
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
    stated = make_peft_config(spec, rank=8, alpha=8.0, dropout=0.0, targets=LORA.targets, base="")
    config = LoraConfig(r=8, target_modules=stated["target_modules"], target_parameters=stated["target_parameters"])
    ours = {name for name, _ in get_peft_model(deepcopy(base), config).named_parameters() if ".lora_" in name}
    loaded = PeftModel.from_pretrained(base, adapter)
    assert ours == {name for name, _ in loaded.named_parameters() if ".lora_" in name}
    merged = MergedTensors(open_source(tmp_path / "model", spec, key="--checkpoint"), adapter, key="--lora")
    truth = {canonical_name(name): tensor for name, tensor in loaded.merge_and_unload().named_parameters()}
    assert merged.specs.keys() == truth.keys() and len(merged.pairs) == len(rows) // 2
    assert max((merged.read(name) - tensor).abs().max() for name, tensor in truth.items()) <= 1e-6


def test_an_adapter_of_other_experts_is_refused(tmp_path: Path) -> None:
    """If its experts have inputs first, as in a checkpoint of Qwen3-VL, its shapes do not fit."""
    make_checkpoint(tmp_path / "model", family="qwen3_5_moe", init="random")
    base = open_source(tmp_path / "model", read_spec(tmp_path / "model"), key="--checkpoint")
    experts, (num_experts, outputs, inputs) = "model.layers.0.mlp.experts", base.specs["model.layers.0.mlp.experts.down_proj"].shape
    (tmp_path / "adapter").mkdir()
    halves = {"lora_A": torch.zeros(num_experts * 8, outputs), "lora_B": torch.zeros(inputs, num_experts * 8)}
    save_file(
        {f"base_model.model.{nested_name(experts)}.{half}.weight": tensor for half, tensor in halves.items()},
        tmp_path / "adapter" / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": [], "target_parameters": list(EXPERT_PARAMETERS)}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"with r=8, do not fit the base tensor {experts}.down_proj "):
        MergedTensors(base, tmp_path / "adapter", key="--lora")
