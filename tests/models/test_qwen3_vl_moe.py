"""Qwen3-VL with experts: layers, fields of the config, and the layout and orientation of experts."""

import json
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForImageTextToText, Qwen3VLMoeForConditionalGeneration

from megatron_rl.config import LoraSettings, ParallelSettings
from megatron_rl.models.adapter_mapping import EXPERT_PARAMETERS, adapter_table
from megatron_rl.models.decoder import qwen3_layer_mappings
from megatron_rl.models.hf_config import parse_spec, read_spec
from megatron_rl.models.known_models import make_released_config
from megatron_rl.models.name_mapping import AttentionHeads, canonical_name
from megatron_rl.policy.expert_lora import build_expert_adapters
from megatron_rl.policy.lora import check_adapter_targets
from megatron_rl.policy.parallel import check_layout
from megatron_rl.weights.formats.merge_lora import add_to_experts
from megatron_rl.weights.formats.open_checkpoint import open_source
from megatron_rl.weights.formats.peft import init_adapters, read_peft_config
from megatron_rl.weights.stream import ShardLocation
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint


def stored_config(**text: object) -> dict:
    config = deepcopy(make_released_config("30B-A3B", family="qwen3_vl_moe"))
    config["text_config"] |= {"num_hidden_layers": 6, "num_experts": 4, "num_experts_per_tok": 2, **text}
    config["vision_config"]["depth"] = 1
    return config


@pytest.mark.parametrize(("step", "dense"), [(1, []), (2, []), (3, [5]), (1, [0, 4])])
def test_the_sparse_layers_are_those_of_transformers(step: int, dense: list[int]) -> None:
    """The layers with experts are those of the model that transformers builds from the config."""
    spec = parse_spec(stored_config(decoder_sparse_step=step, mlp_only_layers=dense), folder="m", key="model.path")
    with torch.device("meta"):
        names = Qwen3VLMoeForConditionalGeneration(deepcopy(spec.config)).state_dict().keys()
    assert [spec.is_sparse(layer) for layer in range(6)] == [
        f"model.language_model.layers.{layer}.mlp.gate.weight" in names for layer in range(6)
    ]
    assert {name for row in spec.param_mappings() for name in row.hf_names} == {canonical_name(name) for name in names}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ({"num_experts": 0}, "num_experts is 0, not a positive integer"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok is 1, not between 2 and num_experts, 4"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, not between 2 and num_experts, 4"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size is -1, not a positive integer"),
        ({"moe_intermediate_size": 770}, "moe_intermediate_size is 770, not a multiple of 8"),
        ({"moe_intermediate_size": 1024}, "moe_intermediate_size is 1024 and hidden_size 2048, .* no clear orientation"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0, not a positive integer"),
        ({"decoder_sparse_step": 7}, "no layer has experts"),
        ({"norm_topk_prob": None}, "norm_topk_prob is missing; vLLM requires it"),
        ({"norm_topk_prob": False}, "text_config.norm_topk_prob is False, supported: True"),
        ({"num_local_experts": 8}, "text_config.num_experts is 4, but num_local_experts, another name of this field, is 8"),
        ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size is 64, supported: 0"),
    ],
)
def test_a_config_that_is_not_computed_is_refused(text: dict, said: str) -> None:
    """Invalid or unsupported settings of the experts are rejected in one line that names the key."""
    with pytest.raises(ValueError, match=rf"^model.path=m: config.json[^\n]*{said}[^\n]*$"):
        parse_spec(stored_config(**text), folder="m", key="model.path")


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_a_rank_has_its_columns_of_every_expert(tp: int) -> None:
    """The shards of fc1 are the rank's columns of gate and of up, cut by hand; converting the
    shards back restores the tensors.
    """
    rows = {row.mcore_name.rpartition(".mlp.")[2]: row for row in qwen3_layer_mappings(0, AttentionHeads(2, 2, 4), is_sparse=True)}
    gate, up, down = torch.randn(5, 4, 6), torch.randn(5, 4, 6), torch.randn(5, 6, 4)
    fc1, fc2, gate_up = rows["experts.linear_fc1"], rows["experts.linear_fc2"], torch.cat((gate, up), -1)
    ones, twos = ([row.to_mcore((tensor,), rank, tp) for rank in range(tp)] for row, tensor in ((fc1, gate_up), (fc2, down)))
    for rank in range(tp):
        columns = slice(rank * 6 // tp, (rank + 1) * 6 // tp)
        assert torch.equal(ones[rank], torch.stack((gate[..., columns], up[..., columns]), 2))
        assert torch.equal(twos[rank], down[:, columns])
    assert torch.equal(fc1.to_hf(ones)[0], gate_up) and torch.equal(fc2.to_hf(twos)[0], down)
    assert not rows.keys() & {"linear_fc1.weight", "linear_fc2.weight"} and rows["router.weight"].shard_dim is None


def test_both_orientations_are_read(tmp_path: Path) -> None:
    """A folder saved by transformers, which swaps the last two dimensions of experts, is read as
    the released form; other shapes are rejected.
    """
    make_checkpoint(tmp_path / "released", family="qwen3_vl_moe", layers=2)
    spec = read_spec(tmp_path / "released")
    AutoModelForImageTextToText.from_pretrained(tmp_path / "released", dtype=torch.float32).save_pretrained(tmp_path / "saved")
    shutil.copy(tmp_path / "released" / "tokenizer.json", tmp_path / "saved")
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("released", "saved")]
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    assert torch.equal(files[0][name], files[1][name].transpose(1, 2)) and files[0][name].shape == (8, 96, 128)
    one, other = (open_source(tmp_path / name, spec, key="model.path") for name in ("released", "saved"))
    assert one.specs == other.specs and all(torch.equal(one.read(name), other.read(name)) for name in one.specs)
    save_file({**files[0], name: files[0][name][:, :-1].contiguous()}, tmp_path / "saved" / "model.safetensors")
    with pytest.raises(ValueError, match=r"experts.down_proj has the shape \[8, 95, 128\], but config.json requires \[8, 96, 128\]"):
        open_source(tmp_path / "saved", spec, key="model.path")


def test_layouts_that_would_compute_otherwise_are_refused() -> None:
    """Tensor parallelism requires sequence parallelism and a divisor of the experts' size."""
    spec = parse_spec(stored_config(moe_intermediate_size=784), folder="m", key="model.path")
    check_layout(ParallelSettings(tp=2, sequence_parallel=True), spec, 2)
    with pytest.raises(ValueError, match=r"^parallel.tp=2: needs parallel.sequence_parallel=true, because the model has experts$"):
        check_layout(ParallelSettings(tp=2), spec, 2)
    with pytest.raises(
        ValueError, match=r"^parallel.tp=4: does not divide the model's 98 groups of 8 rows of each expert \(moe_intermediate_size\)"
    ):
        check_layout(ParallelSettings(tp=4, sequence_parallel=True), spec, 4)


@pytest.mark.parametrize(
    ("ep", "world_size", "said"),
    [
        (2, 1, r"^parallel.ep=2: must divide the data-parallel size \(1\), the number of processes / \(tp \* pp\)$"),
        (3, 4, r"^parallel.ep=3: must divide the data-parallel size \(4\)"),
        (3, 3, r"^parallel.ep=3: does not divide the model's 4 experts of a layer \(num_experts\); use one of 1, 2, 4$"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(ep: int, world_size: int, said: str) -> None:
    """Expert parallelism divides the data-parallel ranks and the experts."""
    spec = parse_spec(stored_config(), folder="m", key="model.path")
    check_layout(ParallelSettings(ep=4), spec, 8)
    with pytest.raises(ValueError, match=said):
        check_layout(ParallelSettings(ep=ep), spec, world_size)


def test_expert_parallelism_needs_experts() -> None:
    """A dense model, a teacher or critic among them, has nothing to divide."""
    spec = replace(parse_spec(stored_config(), folder="m", key="model.path"), experts=None)
    with pytest.raises(ValueError, match=r"^parallel.ep=2: needs a model with experts, and the teacher has none; use 1$"):
        check_layout(ParallelSettings(ep=2), spec, 2, model_label="the teacher")
    with pytest.raises(ValueError, match=r"^parallel.ep=0: must be at least 1$"):
        ParallelSettings(ep=0)


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"rank": 4}, r"lora.rank=4: must be a multiple of 8 for adapters on experts; change it, or leave mlp out of lora.targets"),
        ({"rank": 8, "dropout": 0.1}, r"lora.dropout=0.1: must be 0 for adapters on experts, as in PEFT; or leave mlp out of lora.targets"),
    ],
)
def test_adapters_on_experts_that_cannot_be_computed_are_refused(lora: dict, said: str) -> None:
    """The grouped matrix product requires rows of 16 bytes, and PEFT rejects dropout. Other targets
    and dense models have no such limits.
    """
    spec = parse_spec(stored_config(), folder="m", key="model.path")
    check_adapter_targets(LoraSettings(rank=8), spec, key="lora.targets")
    check_adapter_targets(LoraSettings(**lora, targets=["attention", "projector"]), spec, key="lora.targets")
    check_adapter_targets(LoraSettings(**lora), replace(spec, experts=None), key="lora.targets")
    check_adapter_targets(LoraSettings(), spec, key="lora.targets")
    with pytest.raises(ValueError, match=f"^critic.{said.replace('of lora', 'of critic.lora')}$"):
        check_adapter_targets(LoraSettings(**lora), spec, key="critic.lora.targets")


def test_adapters_on_experts_have_pefts_layout() -> None:
    """A and B of each expert have the numbers with which PEFT's own function computes its change; the
    shards of two ranks give them back.
    """
    spec, generator = parse_spec(stored_config(), folder="m", key="model.path"), torch.Generator().manual_seed(0)
    assert spec.experts is not None
    num, hidden, size = spec.experts.num_experts, spec.hidden_size, spec.experts.ffn_size
    experts = nn.Module()
    experts.gate_up_proj, experts.down_proj = nn.Parameter(torch.zeros(num, 2 * size, hidden)), nn.Parameter(torch.zeros(num, hidden, size))
    rows = {row.mcore_name.rpartition("experts.")[2]: row for row in adapter_table(spec, targets=["mlp"], vision_names=[])}
    for name, weight in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
        wrapper = ParamWrapper(experts, "default", weight, LoraConfig(r=8), r=8, lora_alpha=8)
        a, b = (half["default"].weight.data.normal_(generator=generator) for half in (wrapper.lora_A, wrapper.lora_B))
        row_a, row_b = (rows[f"adapters.{name}.lora_{half}"] for half in "ab")
        shards = [[row.to_mcore((tensor,), rank, 2) for rank in range(2)] for row, tensor in ((row_a, a), (row_b, b))]
        whole_a, whole_b = row_a.to_mcore((a,), 0, 1), row_b.to_mcore((b,), 0, 1)
        change = add_to_experts(torch.zeros(num, a.shape[1], b.shape[0]), whole_a, whole_b.flatten(2), scale=1.0)
        torch.testing.assert_close(change.transpose(1, 2), wrapper.get_delta_weight("default"))
        assert torch.equal(row_a.to_hf(shards[0])[0], a) and torch.equal(row_b.to_hf(shards[1])[0], b)
        assert (row_a.shard_dim, row_b.shard_dim) == ((None, 3) if name == "linear_fc1" else (2, None))
        assert (row_a.expert_dim, row_b.expert_dim) == (0, 0)


def test_new_adapters_on_experts_start_as_pefts_do() -> None:
    """A is uniform in +-1 / sqrt(inputs), and B is zero; the experts differ."""
    spec = parse_spec(stored_config(num_hidden_layers=1), folder="m", key="model.path")
    assert spec.experts is not None
    size, hidden = spec.experts.ffn_size, spec.hidden_size
    weights = {"linear_fc1": nn.Parameter(torch.empty(4, hidden, 2, size)), "linear_fc2": nn.Parameter(torch.empty(4, size, hidden))}
    experts = nn.ModuleDict({"adapters": build_expert_adapters(LoraSettings(rank=8), weights, tp=1)})
    layers = nn.ModuleList([nn.ModuleDict({"mlp": nn.ModuleDict({"experts": experts})})])
    chunks = nn.ModuleList([nn.ModuleDict({"language": nn.ModuleDict({"decoder": nn.ModuleDict({"layers": layers})})})])
    one: Any = SimpleNamespace(size=lambda: 1)
    rows = adapter_table(spec, targets=["mlp"], vision_names=[])
    init_adapters(chunks, rows, ShardLocation(0, one, 0, one, chunks=1, layers_per_chunk=1), seed=0)
    for name, inputs in (("linear_fc1", hidden), ("linear_fc2", size)):
        adapter = experts.get_submodule(f"adapters.{name}")
        a, b = adapter.get_parameter("lora_a"), adapter.get_parameter("lora_b")
        assert not b.any()
        assert 0.99 * inputs**-0.5 < a.abs().max() <= inputs**-0.5
        assert a.std().item() == pytest.approx((3 * inputs) ** -0.5, rel=0.02)
        assert not torch.equal(a[0], a[1])


def test_other_parameters_of_experts_are_refused(tmp_path: Path) -> None:
    """An adapter on only one of the experts' parameters, which PEFT nests otherwise, is refused."""
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_parameters": list(EXPERT_PARAMETERS)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert read_peft_config(tmp_path, key="--lora")["r"] == 8
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "target_parameters": ["mlp.experts.down_proj"]}))
    with pytest.raises(ValueError, match=r"^--lora=.*: target_parameters=\['mlp.experts.down_proj'\] in its .* supported; adapt both"):
        read_peft_config(tmp_path, key="--lora")
