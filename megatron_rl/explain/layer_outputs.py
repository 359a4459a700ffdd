"""Records a network's outputs under names shared by Hugging Face's model and the trainer's model.

In the order of computation, the names are patches, tower patches, tower block 0, ..., tower output,
embedding, rotary angles, layer 0 attention, layer 0 mlp, layer 0, ..., last norm.

The output of a decoder layer is recorded as the input of the next layer. The recorded output
therefore includes the features that Qwen3-VL adds between the layers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_rl.explain.findings import LAYER_TOLERANCE, relative_row_diffs

LayerOutputs = dict[str, torch.Tensor]
"""Maps a name to a tensor [rows, ...]. Each row is a patch, a vision token or a sequence token."""
ToRows = Callable[[Any], torch.Tensor]
ATTENTION_NAMES = ("self_attention", "self_attn", "linear_attn")
"""Names of the module of a decoder layer that mixes tokens, in Megatron and in transformers."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ProbePoints:
    """Modules of a network (or of this rank's chunk) at which outputs are recorded."""

    tower: nn.Module | None
    rotary: nn.Module | None
    layers: nn.ModuleList
    """Decoder layers, each with a module `mlp` and one with a name in ATTENTION_NAMES."""
    norm: nn.Module | None
    first_layer: int = 0
    """Global index of the first layer in `layers`."""
    hidden_rows: ToRows
    """Function that converts hidden states to [rows, ...]."""
    angle_rows: ToRows
    """Function that converts rotary angles to [rows, ...]."""


def layer_names(num_blocks: int, num_layers: int) -> list[str]:
    """Return the names of all outputs in the order of computation."""
    tower = ["patches", "tower patches", *(f"tower block {number}" for number in range(num_blocks)), "tower output"]
    parts = [f"layer {number}{part}" for number in range(num_layers) for part in (" attention", " mlp", "")]
    return [*tower, "embedding", "rotary angles", *parts, "last norm"]


@contextmanager
def record_outputs(probes: ProbePoints) -> Iterator[LayerOutputs]:
    """Record the outputs by name within the with block."""
    passed: LayerOutputs = {}
    with ExitStack() as closing:

        def output_of(module: nn.Module, name: str, take: ToRows) -> None:
            def keep(_: nn.Module, __: tuple, output: object) -> None:
                passed[name] = copy_to_cpu(take(output))

            closing.callback(module.register_forward_hook(keep).remove)

        def input_of(module: nn.Module, name: str, take: ToRows) -> None:
            def keep(_: nn.Module, given: tuple, named: Mapping[str, object]) -> None:
                passed[name] = copy_to_cpu(take(given[0] if given else named["hidden_states"]))

            closing.callback(module.register_forward_pre_hook(keep, with_kwargs=True).remove)

        if probes.tower is not None:
            input_of(probes.tower, "patches", first_tensor)
            output_of(probes.tower.get_submodule("patch_embed"), "tower patches", first_tensor)
            for number, block in enumerate(probes.tower.get_submodule("blocks").children()):
                output_of(block, f"tower block {number}", first_tensor)
            output_of(probes.tower.get_submodule("merger"), "tower output", first_tensor)
        if probes.rotary is not None:
            output_of(probes.rotary, "rotary angles", probes.angle_rows)
        for number, layer in enumerate(probes.layers, probes.first_layer):
            input_of(layer, _input_name(number), probes.hidden_rows)
            attention = next(child for name, child in layer.named_children() if name in ATTENTION_NAMES)
            output_of(attention, f"layer {number} attention", probes.hidden_rows)
            output_of(layer.get_submodule("mlp"), f"layer {number} mlp", probes.hidden_rows)
        if probes.norm is not None:
            input_of(probes.norm, _input_name(probes.first_layer + len(probes.layers)), probes.hidden_rows)
            output_of(probes.norm, "last norm", probes.hidden_rows)
        yield passed


def _input_name(number: int) -> str:
    return f"layer {number - 1}" if number else "embedding"


def is_vision_output(name: str) -> bool:
    """Return True if the rows of an output belong to images instead of sequence tokens."""
    return name == "patches" or name.startswith("tower")


def copy_to_cpu(value: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the CPU as float32.

    The copy is needed because later modules may add to a layer's output in place, as Megatron's
    residual connections do.
    """
    return value.detach().float().cpu().clone()


def first_tensor(value: Any) -> torch.Tensor:
    """Return the first element of `value` if it is a tuple, else `value` itself.

    `value` is the input or output of a module.
    """
    return value[0] if isinstance(value, tuple) else value


@dataclass(slots=True, frozen=True)
class LayerDeviation:
    """First output in which two networks differ."""

    name: str
    row: int
    """Index of the first row that exceeds the tolerance, or -1 if the shapes differ."""
    relative_diff: float
    """Relative difference of the first row that exceeds the tolerance."""
    max_diff_before: float
    """Largest relative difference over all earlier outputs."""


def find_first_deviation(
    outputs: LayerOutputs, reference: LayerOutputs, names: Sequence[str], *, tolerance: float = LAYER_TOLERANCE
) -> LayerDeviation | None:
    """Return the first deviation from `reference`, or None if all common outputs agree."""
    largest = 0.0
    for name in names:
        if name not in outputs or name not in reference:
            continue
        if outputs[name].shape != reference[name].shape:
            return LayerDeviation(name, -1, float("inf"), largest)
        gaps = relative_row_diffs(outputs[name], reference[name])
        wrong = (~(gaps <= tolerance)).nonzero()
        if len(wrong):
            return LayerDeviation(name, int(wrong[0]), float(gaps[wrong[0, 0]]), largest)
        largest = max(largest, float(gaps.max()) if len(gaps) else 0.0)
    return None
