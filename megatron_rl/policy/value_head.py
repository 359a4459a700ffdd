"""The value head: from a trunk's last hidden state before a sampled token to what is expected to be earned from there on."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import linear, silu


class ValueHead(nn.Module):
    """Linear layers with SiLU between them, computed in fp32 whatever their weights are; the same on all tensor-parallel ranks.

    The last layer starts at zero, so a new head expects 0. With `normalize_returns` its units are returns less their mean over their
    deviation, both over all that it has seen; else they are the returns' own.
    """

    def __init__(self, hidden_size: int, head_sizes: Sequence[int], *, dtype: torch.dtype, normalize_returns: bool) -> None:
        """Without numbers until `reset_parameters`."""
        super().__init__()
        sizes = [hidden_size, *head_sizes, 1]
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(rows, columns, dtype=dtype)) for columns, rows in pairwise(sizes))
        self.biases = nn.ParameterList(nn.Parameter(torch.empty(size, dtype=dtype)) for size in sizes[1:])
        for parameter in self.parameters():
            parameter.tensor_model_parallel = False
        self.normalize_returns = normalize_returns
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))
        """How many returns it has seen, their mean, and the sum of their squared distances from it."""

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Weights of deviation 1 / sqrt(inputs), those of the last layer and all biases 0."""
        generator = torch.Generator().manual_seed(seed)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5)
            bias.zero_()
        self.weights[-1].zero_()

    def forward(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Values [R] in the head's units."""
        x = hidden_RH.float()
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = linear(silu(x) if number else x, weight.float(), bias.float())
        return x[:, 0]

    @torch.no_grad()
    def update_return_stats(self, returns: Sequence[float]) -> None:
        """Take a step's returns into the mean and the deviation (T. F. Chan et al., 1979, on merging two samples)."""
        more = torch.tensor(returns, dtype=torch.float64, device=self.seen.device)
        if not self.normalize_returns or more.numel() == 0:
            return
        count, mean, squares = self.seen
        total, apart = count + more.numel(), more.mean() - mean
        squares = squares + (more - more.mean()).square().sum() + apart.square() * count * more.numel() / total
        self.seen.copy_(torch.stack([total, mean + apart * more.numel() / total, squares]))

    def normalize(self, x_R: torch.Tensor) -> torch.Tensor:
        """Returns in the head's units."""
        mean, scale = self._moments()
        return (x_R - mean) / scale

    def denormalize(self, value_R: torch.Tensor) -> torch.Tensor:
        """The inverse."""
        mean, scale = self._moments()
        return value_R * scale + mean

    def _moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and deviation; 0 and 1 where it does not normalize, and until two returns differ."""
        count, mean, squares = self.seen
        return torch.where(squares > 0, mean, 0.0), torch.where(squares > 0, (squares / count).sqrt(), 1.0)
