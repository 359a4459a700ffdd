"""Pictures that are added again behind the first decoder layers (DeepStack, arXiv 2406.04334; Qwen3-VL).

What is added lies beside the embeddings until it is cut off, so it is gathered over ranks and scattered over a sequence as they are. It
cannot travel through Megatron's layers as an input; it goes with what does (SharedPromptParams), where autograd does not follow:
recomputation is reentrant, and would run the tower's backward pass once a layer. So each layer leaves its gradient here, and the
embeddings' backward pass, which comes after all of them, hands the gradients on.
"""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(slots=True)
class DeepStack:
    """Of one micro-batch."""

    added: list[torch.Tensor]
    """[T, 1, H] for each of the first layers; zero at tokens of text."""
    gradients: list[torch.Tensor | None]
    is_trained: bool
    """Whether anybody wants the gradients; else they are not kept."""


def split_embeddings(embedded: torch.Tensor, width: int, *, is_trained: bool) -> tuple[torch.Tensor, DeepStack | None]:
    """Embeddings [T, 1, n * width] -> those of the first layer, [T, 1, width], and what the n - 1 layers add; None where nothing is.

    is_trained: a gradient of what is added reaches the tower's parameters. It is the same on all ranks of a sequence, also on those without
    a picture: each has the gradient of a part of it, which the others need.
    """
    if embedded.shape[-1] == width:
        return embedded, None
    hidden, *added = embedded.split(width, -1)
    stacked = DeepStack([part.detach() for part in added], [None] * len(added), is_trained)
    return _PassThrough.apply(hidden, torch.cat(added, -1), stacked) if is_trained else hidden, stacked


def add_to_layer(number: int, layer: nn.Module, inputs: tuple, kwargs: dict, output: tuple) -> tuple:
    """A forward hook of the layer with this number (of its model's): its hidden states with what is added to them."""
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
    """The identity on hidden; the gradient of `added` is what the layers left."""

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, added: torch.Tensor, stacked: DeepStack) -> torch.Tensor:  # noqa: ANN001
        ctx.stacked = stacked
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # noqa: ANN001
        return gradient, torch.cat(ctx.stacked.gradients, -1), None
