"""DeepStack: adds image features again after the first decoder layers (arXiv 2406.04334; Qwen3-VL).

The features are concatenated to the embeddings until `split_embeddings`, so that both are gathered
over ranks and scattered along the sequence together. Megatron's layers do not accept them as an
input. They are passed in SharedPromptParams instead, without autograd: recomputation is reentrant
and would run the vision tower's backward pass once per layer. Each layer therefore stores its
gradient in `DeepStack.gradients`. The backward pass of the embeddings, which runs after those of
all layers, passes the stored gradients on to the vision tower.
"""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(slots=True)
class DeepStack:
    """DeepStack features of one micro-batch, and their gradients."""

    added: list[torch.Tensor]
    """Features [T, 1, H] for each of the first layers; zero at text tokens."""
    gradients: list[torch.Tensor | None]
    """Gradient of the features of each layer, stored in that layer's backward pass."""
    is_trained: bool
    """True if the vision tower needs the gradients; otherwise they are not stored."""


def split_embeddings(embedded: torch.Tensor, width: int, *, is_trained: bool) -> tuple[torch.Tensor, DeepStack | None]:
    """Split embeddings [T, 1, n * width] into the first layer's input and n - 1 features.

    Returns the input [T, 1, width] and the features of the first n - 1 layers, which are None if n
    is 1. `is_trained` is True if parameters of the vision tower need the features' gradient. Pass
    the same value on all ranks of a sequence, even on ranks without an image: each rank has the
    gradient of a part of the sequence, which the others need.
    """
    if embedded.shape[-1] == width:
        return embedded, None
    hidden, *added = embedded.split(width, -1)
    stacked = DeepStack([part.detach() for part in added], [None] * len(added), is_trained)
    return _PassThrough.apply(hidden, torch.cat(added, -1), stacked) if is_trained else hidden, stacked


def add_to_layer(number: int, layer: nn.Module, inputs: tuple, kwargs: dict, output: tuple) -> tuple:
    """Add the DeepStack features of layer `number` to its hidden states.

    Register it as a forward hook. `number` counts from the first decoder layer of the model.
    """
    stacked: DeepStack | None = kwargs["packed_seq_params"].stacked
    hidden, context = output
    return output if stacked is None else (_Add.apply(hidden, stacked, number), context)


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: torch.Tensor, stacked: DeepStack, number: int) -> torch.Tensor:  # noqa: ANN001
        ctx.stacked, ctx.number = stacked, number
        return hidden + stacked.added[number]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ANN001
        if ctx.stacked.is_trained:
            ctx.stacked.gradients[ctx.number] = gradient
        return gradient, None, None


class _PassThrough(torch.autograd.Function):
    """Identity on `hidden`. The gradient of `added` consists of those stored by the layers."""

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, added: torch.Tensor, stacked: DeepStack) -> torch.Tensor:  # noqa: ANN001
        ctx.stacked = stacked
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # noqa: ANN001
        return gradient, torch.cat(ctx.stacked.gradients, -1), None
