"""DeepStack: adds image features to the outputs of the first decoder layers.

Sources: arXiv 2406.04334; Qwen3-VL. Until `split_embeddings` is called, the features are
concatenated with the embeddings. Features and embeddings therefore require only one gather over
ranks and one scatter along the sequence.

Megatron's layers do not accept the features as an input, so SharedPromptParams passes them to the
layers. The features are detached from autograd, because Megatron's recomputation is reentrant and
would run the vision tower's backward pass once per layer. Each layer therefore stores the gradient
of its features in `DeepStack.gradients`. The backward pass of the embeddings, which runs after the
backward passes of all layers, passes the stored gradients on to the vision tower.
"""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(slots=True)
class DeepStack:
    """DeepStack features of one micro-batch and their gradients."""

    added: list[torch.Tensor]
    """Features [T, 1, H] for each of the first decoder layers; zero at text tokens."""
    gradients: list[torch.Tensor | None]
    """Gradient of each layer's features, stored during that layer's backward pass."""
    is_trained: bool
    """True if the vision tower needs the feature gradients; if False, the gradients are not stored.
    """


def split_embeddings(embedded: torch.Tensor, width: int, *, is_trained: bool) -> tuple[torch.Tensor, DeepStack | None]:
    """Split embeddings [T, 1, n * width] into the first layer's input and DeepStack features.

    Returns the input [T, 1, width] and the features for the first n - 1 layers; the features are
    None if n is 1. Set `is_trained` to True if parameters of the vision tower need the features'
    gradient. Ranks that share a sequence must pass the same value of `is_trained`, even if a rank
    has no image. Each rank computes the gradient for one part of the sequence, and the other ranks
    need that gradient.
    """
    if embedded.shape[-1] == width:
        return embedded, None
    hidden, *added = embedded.split(width, -1)
    stacked = DeepStack([part.detach() for part in added], [None] * len(added), is_trained)
    return _PassThrough.apply(hidden, torch.cat(added, -1), stacked) if is_trained else hidden, stacked


def add_to_layer(number: int, layer: nn.Module, inputs: tuple, kwargs: dict, output: tuple) -> tuple:
    """Add the DeepStack features of layer `number` to the layer's hidden states.

    Register this function as a forward hook of the layer. `number` is the zero-based index of the
    decoder layer in the whole model.
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
    """Returns `hidden` unchanged; the gradient of `added` is read from `DeepStack.gradients`."""

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, added: torch.Tensor, stacked: DeepStack) -> torch.Tensor:  # noqa: ANN001
        ctx.stacked = stacked
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # noqa: ANN001
        return gradient, torch.cat(ctx.stacked.gradients, -1), None
