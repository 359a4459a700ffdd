"""LoRA adapters against results computed by hand, their name table against Hugging Face's modules,
and rejection of unsupported PEFT folders."""

import json
import re
import resource
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from megatron_rl.config import LoraSettings
from megatron_rl.models.adapter_mapping import adapter_table
from megatron_rl.models.known_models import load_known_spec
from megatron_rl.models.name_mapping import PEFT_PREFIX, AttentionHeads, ParamMapping, canonical_name, fuse_qkv, nested_name
from megatron_rl.models.qwen2_5_vl import QWEN2_5_VL
from megatron_rl.policy.lora import LoraAdapter, adapt_vision, disabled_adapters, merged_weight_fns
from megatron_rl.weights.formats.peft import (
    CONFIG,
    KNOWN_FIELDS,
    WEIGHTS,
    init_adapters,
    load_peft,
    make_peft_config,
    write_peft,
)
from megatron_rl.weights.stream import ShardLocation

TARGETS = {
    "attention": r"model\.language_model\..*self_attn\.[qkvo]_proj",
    "mlp": r"model\.language_model\..*mlp\..*",
    "vision": r"model\.visual\.blocks\..*",
    "projector": r"model\.visual\.merger\..*",
}
VISION_LORA = QWEN2_5_VL.vision_lora_patterns
MODEL = load_known_spec("Qwen/Qwen2.5-VL-3B-Instruct")
LORA = LoraSettings(rank=2, alpha=6.0, targets=["projector"])


def random_(parameters: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


@pytest.fixture(scope="module")
def linears(random_model: Path) -> dict[str, nn.Linear]:
    """Return all linear layers of HF's model by name, except the LM head."""
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_pretrained(random_model))
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"}


def rows_for(linears: dict[str, nn.Linear], targets: list[str]) -> list[ParamMapping]:
    vision = [name.removeprefix("model.visual.") + ".weight" for name in linears if name.startswith("model.visual.")]
    others = ["patch_embed.proj.weight", "merger.ln_q.weight", "merger.mlp.0.bias"]
    return adapter_table(replace(MODEL, num_layers=4), targets=targets, vision_names=[*vision, *others])


@pytest.mark.parametrize("targets", [["attention"], ["mlp"], ["vision"], ["projector"], ["attention", "projector"], list(TARGETS)])
def test_every_target_has_its_pair_and_peft_adapts_the_same(targets: list[str], linears: dict[str, nn.Linear]) -> None:
    """The pattern in adapter_config.json matches exactly the modules that have adapter tensors.

    All four targets together cover all linear layers.
    """
    wanted = {name for name in linears if any(re.fullmatch(TARGETS[target], name) for target in targets)}
    assert len(targets) < 4 or wanted == linears.keys()
    names = [PEFT_PREFIX + nested_name(name) for row in rows_for(linears, targets) for name in row.hf_names]
    assert sorted(names) == sorted(f"base_model.model.{name}.lora_{half}.weight" for name in wanted for half in "AB")
    pattern = make_peft_config(MODEL, rank=2, alpha=6.0, dropout=0.0, targets=targets, base="base")["target_modules"]
    assert {name for name in linears if re.fullmatch(pattern, name)} == wanted


def test_names_go_there_and_back(linears: dict[str, nn.Linear]) -> None:
    """Every adapter name is restored from its PEFT name."""
    for row in rows_for(linears, list(TARGETS)):
        assert canonical_name(PEFT_PREFIX + nested_name(row.hf_names[0])) == row.hf_names[0]


def fused(dropout: float) -> LoraAdapter:
    """Return an adapter of a fused QKV layer with four query heads, two key/value heads and head
    size 1."""
    heads = AttentionHeads(num_query_heads=4, num_kv_heads=2, head_dim=1)
    adapter = LoraAdapter(
        LoraSettings(rank=2, alpha=6.0, dropout=dropout), 5, {"q_proj": 4, "k_proj": 2, "v_proj": 2},
        dtype=torch.float32, fuse=partial(fuse_qkv, heads=heads),
    )  # fmt: skip
    random_(adapter)
    return adapter


def by_hand(adapter: LoraAdapter, x: torch.Tensor) -> torch.Tensor:
    """Compute each projection separately, and return the outputs in the order q0 q1 k0 v0 q2 q3 k1
    v1."""
    q, k, v = (x @ adapter.lora_a[name].T @ adapter.lora_b[name].T * 3.0 for name in ("q_proj", "k_proj", "v_proj"))
    return torch.stack([q[:, 0], q[:, 1], k[:, 0], v[:, 0], q[:, 2], q[:, 3], k[:, 1], v[:, 1]], 1)


def test_a_fused_layer_carries_three_adapters() -> None:
    """The adapter of a fused QKV layer equals three separate adapters, both applied and merged."""
    adapter = fused(dropout=0.0)
    x, output, weight = torch.randn(7, 5), torch.randn(7, 8), torch.randn(8, 5)
    expected = output + by_hand(adapter, x)
    torch.testing.assert_close(adapter(output, x), expected)
    before = weight.clone()
    torch.testing.assert_close(x @ adapter.merge_into(weight).T, x @ weight.T + by_hand(adapter, x))
    assert torch.equal(weight, before)


def test_dropout_takes_inputs_out_in_training_only() -> None:
    """Dropout applies to the adapter's input in training and not in evaluation."""
    adapter = fused(dropout=0.25)
    x, output = torch.randn(300, 5), torch.zeros(300, 8)
    torch.manual_seed(1)
    mask = torch.nn.functional.dropout(torch.ones_like(x), 0.25)
    assert mask.unique().tolist() == pytest.approx([0, 4 / 3])
    torch.manual_seed(1)
    torch.testing.assert_close(adapter(output, x), by_hand(adapter, x * mask))
    torch.testing.assert_close(adapter.eval()(output, x), by_hand(adapter, x))


class Merger(nn.Module):
    """The part of a model chunk that target `projector` adapts, with the names it has there."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Module()
        self.vision.merger = nn.Module()
        self.vision.merger.mlp = nn.Sequential(nn.Linear(60, 50), nn.GELU(), nn.Linear(50, 6))


ONE = SimpleNamespace(size=lambda: 1)
PLACEMENT = ShardLocation(0, ONE, 0, ONE, chunks=1, layers_per_chunk=1)
NAMES = ["merger.mlp.0.weight", "merger.mlp.2.weight", "merger.mlp.0.bias"]
ROWS = adapter_table(MODEL, targets=["projector"], vision_names=NAMES)


@pytest.fixture
def chunks() -> nn.ModuleList:
    chunk = Merger()
    adapt_vision(chunk.vision, LORA, VISION_LORA)
    return nn.ModuleList([chunk])


def test_a_layer_of_the_tower_keeps_its_parameters_and_can_be_itself_again() -> None:
    """Adapting the vision tower keeps its parameter objects.

    With a new adapter or with disabled adapters the output equals the original bit for bit, and
    merged weights give the adapted output within 1e-5.
    """
    plain = Merger()
    x = torch.randn(3, 60)
    parameters, output = dict(plain.named_parameters()), plain.vision.merger.mlp(x)
    chunks = nn.ModuleList([plain])
    adapt_vision(plain.vision, LORA, VISION_LORA)
    for name, parameter in parameters.items():
        assert plain.get_parameter(name) is parameter
    init_adapters(chunks, ROWS, PLACEMENT, seed=0)
    assert torch.equal(plain.vision.merger.mlp(x), output)
    for index in (0, 2):
        random_(plain.vision.merger.mlp[index].adapter)
    adapted = plain.vision.merger.mlp(x)
    assert not torch.allclose(adapted, output)
    with disabled_adapters(chunks):
        assert torch.equal(plain.vision.merger.mlp(x), output)
    assert torch.equal(plain.vision.merger.mlp(x), adapted), "all of them are on again"
    merged = Merger()
    merged.load_state_dict({**parameters, **{name.removeprefix("0."): make() for name, make in merged_weight_fns(chunks).items()}})
    found = merged.vision.merger.mlp(x)
    assert (found - adapted).norm() <= 1e-5 * adapted.norm()


def test_adapters_are_merged_in_fp32(chunks: nn.ModuleList) -> None:
    """A merged bfloat16 weight is the float64 result rounded once, without intermediate
    rounding."""
    chunks.to(torch.bfloat16)
    linear = chunks[0].vision.merger.mlp[0]
    random_(linear.adapter)
    a, b, weight = (tensor.detach().double() for tensor in (linear.adapter.lora_a["0"], linear.adapter.lora_b["0"], linear.weight))
    whole = weight + linear.adapter.scale * (b @ a)
    error = (merged_weight_fns(chunks)["0.vision.merger.mlp.0.weight"]().double() - whole).abs()
    assert (error <= (1 + 1e-4) * (whole.to(torch.bfloat16).double() - whole).abs() + 1e-7).all()


def test_new_adapters_start_as_pefts_do(chunks: nn.ModuleList) -> None:
    """A new adapter starts like PEFT's: A is uniform in +-1 / sqrt(inputs) and B is zero. A depends
    on the seed and the parameter name."""
    init_adapters(chunks, ROWS, PLACEMENT, seed=0)
    first, second = (chunks[0].vision.merger.mlp[index].adapter for index in (0, 2))
    a = first.lora_a["0"].detach().clone()
    assert a.abs().max() <= 60**-0.5 and a.abs().max() > 0.9 * 60**-0.5
    assert a.std() == pytest.approx((3 * 60) ** -0.5, rel=0.15)
    assert not first.lora_b["0"].any() and not second.lora_b["2"].any()
    other = second.lora_a["2"].flatten() * (50 / 60) ** 0.5
    assert not torch.allclose(a.flatten()[: other.numel()], other, rtol=1e-3), "the same numbers, in other units"
    init_adapters(chunks, ROWS, PLACEMENT, seed=1)
    assert not torch.equal(first.lora_a["0"], a)
    init_adapters(chunks, ROWS, PLACEMENT, seed=0)
    assert torch.equal(first.lora_a["0"], a)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write an adapter folder that fits `chunks`."""
    sizes = {"0": (60, 50), "2": (50, 6)}
    tensors = {f"visual.merger.mlp.{i}.lora_A.weight": torch.randn(2, size[0]) for i, size in sizes.items()}
    tensors |= {f"visual.merger.mlp.{i}.lora_B.weight": torch.randn(size[1], 2) for i, size in sizes.items()}
    config = make_peft_config(MODEL, rank=2, alpha=6.0, dropout=0.0, targets=["projector"], base="base")
    write_peft(tmp_path / "adapter", iter(tensors.items()), config)
    return tmp_path / "adapter"


def test_what_was_written_is_read(chunks: nn.ModuleList, folder: Path) -> None:
    """A written adapter is loaded with the same tensors."""
    load_peft(chunks, ROWS, PLACEMENT, folder, rank=2, alpha=6.0)
    stored = load_file(folder / WEIGHTS)
    loaded = chunks[0].vision.merger.mlp[2].adapter.lora_b["2"]
    assert torch.equal(loaded, stored["base_model.model.model.visual.merger.mlp.2.lora_B.weight"])
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS]


@pytest.mark.parametrize(("change", "message"), [
    ({"r": 4}, "^lora.rank=2: the adapter in lora.path=.* has 4; use the same value"),
    ({"lora_alpha": 16}, "^lora.alpha=6.0: the adapter in lora.path=.* has 16; use the same value"),
    ({"use_dora": True}, "^lora.path=.*: use_dora=True in its adapter_config.json is not supported"),
    ({"layers_to_transform": [0]}, r"^lora.path=.*: layers_to_transform=\[0\] in its adapter_config.json is not supported"),
    ({"exclude_modules": ["q_proj"]}, r"^lora.path=.*: exclude_modules=\['q_proj'\] in its"),
    ({"rank_pattern": {"q_proj": 4}}, "^lora.path=.*: rank_pattern={'q_proj': 4} in its"),
    ({"alpha_pattern": {"q_proj": 4}}, "^lora.path=.*: alpha_pattern={'q_proj': 4} in its"),
    ({"layer_gains": 0.5, "use_later_kind": True}, "^lora.path=.*: layer_gains=0.5, use_later_kind=True in its"),
    ({"bias": "all"}, "^lora.path=.*: bias=all in its"),
    ({"peft_type": "IA3"}, "^lora.path=.*: peft_type=IA3 in its"),
    ({"modules_to_save": ["lm_head"]}, "^lora.path=.*: modules_to_save="),
    ({"use_rslora": True}, r"^lora.path=.*: the adapter.s scale is alpha / sqrt\(rank\)"),
    ({"init_lora_weights": "corda"}, "^lora.path=.*: init_lora_weights=corda in its .*path_initial_model_for_weight_conversion"),
    ({"init_lora_weights": "loftq"}, "^lora.path=.*: init_lora_weights=loftq in its"),
    ({"init_lora_weights": "lora_ga"}, "^lora.path=.*: init_lora_weights=lora_ga in its"),
    ({"init_lora_weights": ["pissa"]}, "^lora.path=.*: init_lora_weights="),
    ({"r": 0}, "^lora.path=.*: r=0 in its adapter_config.json is not a positive integer"),
    ({"r": "8"}, "^lora.path=.*: r=8 in its .* is not a positive integer"),
    ({"lora_alpha": "16"}, "^lora.path=.*: lora_alpha=16 in its .* is not a finite number"),
    ({"lora_alpha": None}, "^lora.path=.*: lora_alpha=None in its .* is not a finite number"),
])  # fmt: skip
def test_an_adapter_of_another_kind_is_refused(change: dict, message: str, chunks: nn.ModuleList, folder: Path) -> None:
    """An adapter with other settings, or one that is not plain LoRA, is rejected with an error that
    names the field."""
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
        load_peft(chunks, ROWS, PLACEMENT, folder, rank=2, alpha=6.0)


def test_of_the_fields_of_peft_only_those_of_a_plain_adapter_may_be_set(chunks: nn.ModuleList, folder: Path) -> None:
    """All of PEFT's own fields are accepted at their defaults.

    Each field outside KNOWN_FIELDS is rejected by name at any other value.
    """
    own = json.loads((folder / CONFIG).read_text())
    plain = {**{name: value for name, value in LoraConfig().to_dict().items() if name not in own}, **own}
    (folder / CONFIG).write_text(json.dumps(plain))
    load_peft(chunks, ROWS, PLACEMENT, folder, rank=2, alpha=6.0)
    others = plain.keys() - set(KNOWN_FIELDS)
    assert {"layers_to_transform", "layers_pattern", "exclude_modules", "use_dora", "modules_to_save", "megatron_config"} < others
    for name in sorted(others):
        (folder / CONFIG).write_text(json.dumps({**plain, name: ["x"]}))
        with pytest.raises(ValueError, match=f"^lora.path={folder}: {name}=\\['x'\\] in its adapter_config.json is not supported"):
            load_peft(chunks, ROWS, PLACEMENT, folder, rank=2, alpha=6.0)


def peft_adapter(base: nn.Module, folder: Path, start: str | bool | None) -> nn.Module:
    """Train an adapter with PEFT, save it, and return the base model with the adapter loaded and
    merged by PEFT."""
    model = get_peft_model(deepcopy(base), LoraConfig(r=2, lora_alpha=6, target_modules=r".*merger\.mlp\.[02]", init_lora_weights=start))
    for name, parameter in model.named_parameters():
        parameter.data += 0.1 * torch.randn_like(parameter) * ("lora_" in name)
    model.save_pretrained(folder)
    return PeftModel.from_pretrained(deepcopy(base), folder).merge_and_unload()


@pytest.mark.parametrize(
    ("start", "is_plain"),
    [
        *((start, True) for start in (True, False, None, "gaussian", "eva", "orthogonal")),
        *((start, False) for start in ("pissa", "pissa_niter_4", "olora")),
    ],
)
def test_an_adapter_that_is_no_addition_to_the_base_is_refused(
    start: str | bool | None, is_plain: bool, chunks: nn.ModuleList, tmp_path: Path
) -> None:
    """An adapter is loaded only if PEFT's own merge equals W + alpha / rank * B A on the given
    base. Others, such as pissa and olora, are rejected."""
    base = nn.Module()
    base.model = nn.Module()
    base.model.visual = Merger().vision
    theirs = peft_adapter(base, tmp_path / "adapter", start)
    stored = load_file(tmp_path / "adapter" / WEIGHTS)
    a, b = (stored[f"{PEFT_PREFIX}model.visual.merger.mlp.2.lora_{half}.weight"] for half in "AB")
    off = (theirs.model.visual.merger.mlp[2].weight - base.model.visual.merger.mlp[2].weight - 3.0 * b @ a).abs().max()
    if is_plain:
        assert off < 1e-6
        load_peft(chunks, ROWS, PLACEMENT, tmp_path / "adapter", rank=2, alpha=6.0)
        assert torch.equal(chunks[0].vision.merger.mlp[2].adapter.lora_b["2"], b)
    else:
        assert off > 0.05
        with pytest.raises(ValueError, match=f"^lora.path={tmp_path}/adapter: init_lora_weights={start} in its adapter_config.json may "):
            load_peft(chunks, ROWS, PLACEMENT, tmp_path / "adapter", rank=2, alpha=6.0)


@pytest.mark.parametrize(("text", "message"), [
    ("{}", "peft_type=None in its adapter_config.json is not supported"),
    ("[]", "its adapter_config.json contains a list instead of a JSON object; copy the file again"),
    ('{"peft_type": "LORA", "lora_alpha": 6}', "r=None in its adapter_config.json is not a positive integer"),
])  # fmt: skip
def test_settings_that_are_none(text: str, message: str, chunks: nn.ModuleList, folder: Path) -> None:
    """An adapter_config.json without valid settings is rejected."""
    (folder / CONFIG).write_text(text)
    with pytest.raises(ValueError, match=f"^lora.path={folder}: {message}"):
        load_peft(chunks, ROWS, PLACEMENT, folder, rank=2, alpha=6.0)


def test_tensors_that_do_not_fit_are_named(chunks: nn.ModuleList, folder: Path) -> None:
    """Missing, extra, misshapen and damaged adapter tensors are rejected by name."""
    stored = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    name = "base_model.model.model.visual.merger.mlp.2.lora_A.weight"
    fewer = {key: tensor for key, tensor in stored.items() if key != name}
    more = stored | {name.replace("mlp.2", "mlp.4"): torch.zeros(2, 50)}
    for tensors, message in (
        (fewer, r"Missing in the adapter: \['visual.merger.mlp.2.lora_A.weight'\] \(1\)"),
        (more, r"not among the targets: \['visual.merger.mlp.4.lora_A.weight'\] \(1\)"),
        (stored | {name: torch.zeros(2, 51)}, r"visual.merger.mlp.2.lora_A.weight: shape \(2, 51\) .* has \(2, 50\)"),
    ):
        save_file(tensors, folder / WEIGHTS)
        with pytest.raises(ValueError, match=message):
            load_peft(chunks, ROWS, PLACEMENT, folder, rank=2, alpha=6.0)
    for file, message in ((WEIGHTS, "^lora.path=.*corrupt"), (CONFIG, "^lora.path=.*damaged")):
        (folder / file).write_bytes((folder / file).read_bytes()[:-8])
        with pytest.raises(ValueError, match=message):
            load_peft(chunks, ROWS, PLACEMENT, folder, rank=2, alpha=6.0)
    (folder / CONFIG).unlink()
    with pytest.raises(ValueError, match="^lora.path=.*: adapter_config.json is missing"):
        load_peft(chunks, ROWS, PLACEMENT, folder, rank=2, alpha=6.0)


def test_a_full_disk_keeps_the_adapter_that_was_there(folder: Path) -> None:
    """If writing an adapter fails, the old adapter stays unchanged."""
    before = (folder / WEIGHTS).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match=WEIGHTS):
            write_peft(folder, iter({"visual.merger.mlp.0.lora_A.weight": torch.zeros(5000)}.items()), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (folder / WEIGHTS).read_bytes() == before
    assert [path.name for path in folder.parent.iterdir()] == ["adapter"]
