"""The parts of a real policy that need numbers, a checkpoint or other ranks, for FakeTensors."""

from collections.abc import Callable
from functools import partialmethod
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.policy import load_model, network, pipeline, policy, vision
from megatron_rl.policy.patches import ImagePatchFn
from megatron_rl.policy.pipeline import Pipeline
from megatron_rl.types import MicroBatch
from tests.support.full_size.fake_device import FakeGpu


def patches_of(model: ModelSpec) -> ImagePatchFn:
    """Return a function that makes the patches of an image, with three channels."""
    size = 3 * model.vision.temporal_patch_size * model.vision.patch_size**2
    return lambda image: torch.empty(image.num_patches, size)


def install(model: ModelSpec, gpu: FakeGpu, *, hidden_shape: list[int], is_last_stage: bool) -> None:
    """Replace what FakeTensors cannot do, for the rest of this process.

    Weights have the shapes of the checkpoint and no values. Inputs that the vision tower computes
    from grids are computed with numbers and then become FakeTensors. Micro-batches are prepared in
    the same thread, because a mode belongs to a thread. The other ranks send the objects that this
    rank sends, and hidden states of `hidden_shape`.
    """
    shapes = model.shapes()
    source = SimpleNamespace(skipped=[], read=lambda name: torch.empty(shapes[name], dtype=torch.bfloat16))
    load_model.open_source = lambda *_, **__: source
    policy.can_share_prompts = lambda *_: True  # its check compares numbers
    pipeline.Pipeline._largest_sizes = partialmethod(read_sizes, gpu)
    policy.HfWeightIterator = lambda *_, **__: None  # an export asks the other stages for their shapes
    assert "prefetch" in vars(pipeline), "prefetch has moved, and would run in a thread"
    pipeline.prefetch = lambda make, items: map(make, items)
    dist.all_gather_object = lambda found, given, group=None: found.__setitem__(slice(None), [given] * len(found))
    if not is_last_stage:
        network.reduce_metrics = lambda *_, **__: {}  # the last stage has the numbers
    P2PCommunicator._communicate_shapes = lambda *_, **__: (hidden_shape, hidden_shape)
    compute, take_step = vision.compute_grid_inputs, network.take_step

    def end_backward_and_step(optimizer: ChainedOptimizer) -> float:
        gpu.end_backward()
        return take_step(optimizer)

    network.take_step = end_backward_and_step

    def compute_with_numbers(grids: list, sizes: object) -> dict[str, torch.Tensor]:
        with _disable_current_modes():
            return compute(grids, sizes)

    vision.compute_grid_inputs = compute_with_numbers

    def to_list(tensor: FakeTensor) -> list:
        if tensor.is_cuda:
            gpu.record("copy to host")
        return _ones(tuple(tensor.shape))

    FakeTensor.tolist = to_list
    nn.Module._apply = convert_parameters


def convert_parameters(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Do what nn.Module._apply does, with new parameters in place of FakeTensors.

    Parameters keep their attributes, and shared parameters stay shared, as on a GPU, where _apply
    changes them in place.
    """
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in made:
                new = made[id(parameter)] = nn.Parameter(fn(parameter.detach()), requires_grad=parameter.requires_grad)
                vars(new).update({key: value for key, value in vars(parameter).items() if key not in vars(new)})
            if parameter is not None:
                part._parameters[name] = made[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = fn(buffer)
    return module


def read_sizes(pipeline: Pipeline, gpu: FakeGpu, batches: list[MicroBatch], *, at_least: int) -> tuple[int, int]:
    """Return the sizes of this rank's micro-batches, as if those of the others were equal."""
    gpu.record("copy to host")
    return len(batches), max(at_least, *(batch.num_tokens for batch in batches))


def _ones(shape: tuple[int, ...]) -> object:
    return 1.0 if not shape else [_ones(shape[1:]) for _ in range(shape[0])]
