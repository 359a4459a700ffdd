"""Transformer Engine's layers: a table of names and shapes is compared with Megatron's spec, with
the names in megatron_rl and with Transformer Engine's source.

Transformer Engine is not installed on the CPU machine. Megatron builds the layers on a fake with
the same names (tests/support/fake_transformer_engine.py). The last tests compare the fake with the
real source if it is installed. tests/gpu/test_kernels_on_gpu.py runs the real layers.
"""

import ast
import inspect
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_rl.models.decoder import qwen2_layer_mappings
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.model_spec import ModelSpec
from tests.conftest import ROOT
from tests.support import fake_transformer_engine

EXTENSION = Path(find_spec("megatron").submodule_search_locations[0]) / "core" / "extensions" / "transformer_engine.py"
HERE = find_spec("transformer_engine")


@dataclass(frozen=True, slots=True)
class Layer:
    """A module of the model, its Megatron class with the line of megatron-core 0.16.1 on which it
    starts, and its class and file in Transformer Engine 2.20.2 (without a line, because the source
    was not available).

    `shapes` maps each parameter on one rank to names of its dimensions.
    """

    place: str
    megatron: str
    line: int
    te: str
    file: str
    shapes: dict[str, tuple[str, ...]] = field(default_factory=dict)


NORMED, PLAIN = "pytorch/module/layernorm_linear.py", "pytorch/module/linear.py"
TABLE = (
    Layer("decoder.layers.0.self_attention.linear_qkv", "TELayerNormColumnParallelLinear", 711, "LayerNormLinear", NORMED,
          {"layer_norm_weight": ("hidden",), "weight": ("qkv", "hidden"), "bias": ("qkv",)}),
    Layer("decoder.layers.0.self_attention.core_attention", "TEDotProductAttention", 1140, "DotProductAttention",
          "pytorch/attention/dot_product_attention/dot_product_attention.py"),
    Layer("decoder.layers.0.self_attention.linear_proj", "TERowParallelLinear", 1040, "Linear", PLAIN, {"weight": ("hidden", "heads")}),
    Layer("decoder.layers.0.mlp.linear_fc1", "TELayerNormColumnParallelLinear", 711, "LayerNormLinear", NORMED,
          {"layer_norm_weight": ("hidden",), "weight": ("gate_and_up", "hidden")}),
    Layer("decoder.layers.0.mlp.linear_fc2", "TERowParallelLinear", 1040, "Linear", PLAIN, {"weight": ("hidden", "ffn")}),
    Layer("decoder.final_layernorm", "RMSNorm", 457, "RMSNorm", "pytorch/module/rmsnorm.py", {"weight": ("hidden",)}),
)  # fmt: skip
"""TENorm.__new__ creates RMSNorm, at that line. A fused norm has no module of its own: Megatron
creates an identity instead.
"""


def sizes_of(model: ModelSpec) -> dict[str, int]:
    heads, groups, ffn = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim, model.ffn_size
    return {"hidden": model.hidden_size, "heads": heads, "qkv": heads + 2 * groups, "ffn": ffn, "gate_and_up": 2 * ffn}


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", *words]
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", **environment}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=280, check=False)


def layers(*words: str, **environment: str) -> dict:
    ended = run("-m", "tests.support.transformer_engine_layers", *words, **environment)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def built(random_model: Path) -> dict:
    return layers(str(random_model))


def test_megatron_builds_the_table(built: dict, random_model: Path) -> None:
    """Megatron's spec creates exactly the parameters and modules of the table."""
    sizes = sizes_of(read_spec(random_model))
    parameters = {
        f"{layer.place}.{name}": [sizes[size] for size in shape] for layer in TABLE for name, shape in layer.shapes.items()
    }  # fmt: skip
    found = {name.removeprefix("language."): shape for name, shape in built["parameters"].items() if name.startswith("language.decoder.")}
    assert {name: shape for name, shape in found.items() if ".layers." not in name or ".layers.0." in name} == parameters
    assert {layer.place: layer.megatron for layer in TABLE} == {layer.place: built["modules"][f"language.{layer.place}"] for layer in TABLE}
    fused = [f"language.decoder.layers.0.{norm}" for norm in ("input_layernorm", "pre_mlp_layernorm")]
    assert [built["modules"][norm] for norm in fused] == ["IdentityOp"] * 2
    assert {f"{norm}.weight" for norm in fused} <= built["our_parameters"].keys() - built["parameters"].keys()


def test_our_names_are_those_of_the_table(random_model: Path) -> None:
    """The names that weights are imported, exported and stored under (models/name_mapping.py,
    Row.fused_norm) equal those of the table.
    """
    heads = read_spec(random_model).heads
    names = {(row.fused_norm or row.mcore_name).removeprefix("language.") for row in qwen2_layer_mappings(0, heads)}
    assert names == {f"{layer.place}.{name}" for layer in TABLE for name in layer.shapes if ".layers." in layer.place}


def test_a_policy_on_its_layers_is_ours(built: dict) -> None:
    """Logits, gradients (by Hugging Face name) and exported weights equal those of the project's
    own layers, to 1e-5 for logits and gradients. This covers packed sequences and fused norms.
    """
    assert built["logits"] <= 1e-5 and built["gradients"] <= 1e-5 and built["same_names"] and built["same_export"]


def test_the_lines_are_those_of_the_installed_megatron() -> None:
    """The table's line numbers and class names match the source of the installed Megatron."""
    lines = EXTENSION.read_text().splitlines()
    for layer in TABLE:
        wanted = f"class {layer.megatron}(" if layer.megatron.startswith("TE") else f"instance = te.pytorch.{layer.megatron}("
        assert lines[layer.line - 1].strip().startswith(wanted), layer
    assert [f"te.pytorch.{layer.te}" in "\n".join(lines) for layer in TABLE] == [True] * len(TABLE)


def test_where_it_works_its_layers_run_and_adapters_take_ours(built: dict) -> None:
    """On a Hopper GPU, Transformer Engine's layers run without adapters, and the project's own
    layers run with adapters.
    """
    found = built["hopper"]
    assert (found["trouble"], found["uses"]) == ("", [True, False])
    assert found["kernels"]["layers"].startswith("transformer_engine") and found["kernels"]["norm"] == "transformer_engine"
    assert found["kernels"]["gradient accumulation"] == "megatron (transformer_engine's fused kernel is installed but not used)"


def test_a_gpu_without_packed_attention_takes_our_layers_and_says_so(built: dict) -> None:
    """The GPU is of the Ada generation (compute capability 8.9), like the L40S."""
    found = built["ada"]
    assert found["uses"] == [False, False] and found["kernels"]["layers"] == "megatron_rl"
    lacks = "has no attention for packed sequences on compute capability 8.9 without flash-attn, using this project's own layers"
    assert re.fullmatch(rf"transformer_engine=\S+: {lacks}", found["trouble"])


def plant(folder: Path, text: str) -> str:
    """Create a package named transformer_engine with this source; return the PYTHONPATH to import
    it.
    """
    (folder / "transformer_engine").mkdir()
    (folder / "transformer_engine" / "__init__.py").write_text(text)
    return f"{ROOT}:{folder}"


def test_one_that_lacks_a_package_is_not_done_without_in_silence(tmp_path: Path) -> None:
    """If a dependency of Transformer Engine is missing, Megatron silently treats it as not
    installed; the report names the reason.
    """
    found = layers(PYTHONPATH=plant(tmp_path, "import no_such_dependency\n"))["hopper"]
    assert found["uses"] == [False, False]
    reason = r"\(No module named 'no_such_dependency'\)"
    assert re.match(
        rf"transformer_engine=\S+: cannot be imported {reason}, using this project's own layers; run bash launch/install_te.sh",
        found["trouble"],
    )


@pytest.mark.parametrize("case", ["no fp8 module", "does not load"])
def test_one_beside_which_megatron_does_not_load_ends_a_run_in_one_line(case: str, tmp_path: Path) -> None:
    """Two installations break Megatron's import: one without the deprecated fp8 module, and one
    whose library was built for another CUDA version.
    """
    without = (
        "from tests.support import fake_transformer_engine; fake_transformer_engine.install_fake(has_fp8=False)\n"
        if case == "no fp8 module"
        else ""
    )
    broken = plant(tmp_path, "raise ImportError('libcudart.so.12: cannot open shared object file')\n")
    given = {"PYTHONPATH": str(ROOT) if without else broken}
    ended = run("-c", f"{without}from megatron_rl.cli import cli; cli()", "model.path=here", "run.dir=there", "task=number_line", **given)
    (line,) = ended.stderr.splitlines()
    told = "error: transformer_engine: megatron-core cannot be imported with the installed version"
    reason = "No module named 'transformer_engine.pytorch.fp8'" if without else "libcudart.so.12: cannot open shared object file"
    assert ended.returncode == 1 and line.startswith(f"{told} ({reason}); bash launch/install_te.sh"), ended.stderr


def lacks(tree: ast.Module, stand_in: type) -> list[str]:
    """Return the fake class's keywords and parameters that the source of the real class does not
    have.
    """
    (real,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == stand_in.__name__] or [None]
    if real is None:
        return ["the class"]
    missing = []
    for name in ("__init__", "forward"):
        (function,) = [node for node in real.body if isinstance(node, ast.FunctionDef) and node.name == name] or [None]
        if function is None or function.args.kwarg is not None:  # inherited, or it accepts any keyword
            continue
        taken = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
        wanted = inspect.signature(getattr(stand_in, name)).parameters
        missing += [f"{name}({keyword})" for keyword in wanted if keyword not in taken | {"linear"}]
    texts = {node.value for node in ast.walk(real) if isinstance(node, ast.Constant)}
    is_normed = stand_in is fake_transformer_engine.LayerNormLinear
    return missing + (["layer_norm_weight"] if is_normed and "layer_norm_weight" not in texts else [])


def test_a_source_that_differs_is_noticed() -> None:
    """The comparison detects a class that lacks a keyword, a class without its norm weight and a
    missing class; it accepts a class that has all of them.
    """
    keywords = ", ".join([*inspect.signature(fake_transformer_engine.LayerNormLinear.__init__).parameters][:-1])
    source = f"class LayerNormLinear:\n def __init__({keywords}): self.register_parameter('layer_norm_weight', 0)\n"
    source += " def forward(self, inp, is_first_microbatch): ...\n"
    assert lacks(ast.parse(source), fake_transformer_engine.LayerNormLinear) == []
    assert lacks(ast.parse(source.replace("eps, ", "")), fake_transformer_engine.LayerNormLinear) == ["__init__(eps)"]
    assert lacks(ast.parse(source.replace("layer_norm_weight", "gamma")), fake_transformer_engine.LayerNormLinear) == ["layer_norm_weight"]
    assert lacks(ast.parse("class Other: ..."), fake_transformer_engine.Linear) == ["the class"]


@pytest.mark.skipif(HERE is None, reason="no Transformer Engine, nor its source: its own names were NOT compared")
@pytest.mark.parametrize("layer", {layer.te: layer for layer in TABLE}.values(), ids=lambda layer: layer.te)
def test_the_stand_in_is_the_real_ones_source(layer: Layer) -> None:
    """The source is parsed, not imported, so no GPU is needed."""
    file = Path(HERE.submodule_search_locations[0]) / layer.file
    assert lacks(ast.parse(file.read_text()), getattr(fake_transformer_engine, layer.te)) == []
