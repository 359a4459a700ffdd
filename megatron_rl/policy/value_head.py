"""Value head: predicts the return from the final hidden state before a sampled token."""

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import nn
from torch.nn.functional import linear, silu

from megatron_rl.weights.stream import MegatronParameter


class ValueHead(nn.Module):
    """MLP with SiLU activations that is replicated on all tensor-parallel ranks.

    Values are computed in fp32, regardless of the dtype of the weights. The last layer is
    initialized to zero, so a new head predicts 0. With `normalize_returns` the head predicts
    normalized returns, (return - mean) / standard deviation, using the statistics of all returns
    seen so far. Without `normalize_returns`, the head predicts unnormalized returns.
    """

    seen: torch.Tensor

    def __init__(self, hidden_size: int, head_sizes: Sequence[int], *, dtype: torch.dtype, normalize_returns: bool) -> None:
        """Create uninitialized parameters; `reset_parameters` initializes them."""
        super().__init__()
        sizes = [hidden_size, *head_sizes, 1]
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(rows, columns, dtype=dtype)) for columns, rows in pairwise(sizes))
        self.biases = nn.ParameterList(nn.Parameter(torch.empty(size, dtype=dtype)) for size in sizes[1:])
        for parameter in self.parameters():
            cast("MegatronParameter", parameter).tensor_model_parallel = False
        self.normalize_returns = normalize_returns
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))
        """Number of returns seen, their mean, and the sum of squared deviations from the mean."""

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Initialize the parameters.

        Weights are drawn from a normal distribution with standard deviation 1 / sqrt(number of
        inputs). Biases and the weights of the last layer are 0.
        """
        generator = torch.Generator().manual_seed(seed)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5)
            bias.zero_()
        self.weights[-1].zero_()

    def forward(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Compute values [R]; the values are normalized if `normalize_returns` is set."""
        x = hidden_RH.float()
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = linear(silu(x) if number else x, weight.float(), bias.float())
        return x[:, 0]

    @torch.no_grad()
    def update_return_stats(self, returns: Sequence[float]) -> None:
        """Update mean and variance with the returns of one step.

        Uses the formula of Chan et al. (1979), which merges the statistics of two samples.
        Does nothing without `normalize_returns`.
        """
        more = torch.tensor(returns, dtype=torch.float64, device=self.seen.device)
        if not self.normalize_returns or more.numel() == 0:
            return
        count, mean, squares = self.seen
        total, apart = count + more.numel(), more.mean() - mean
        squares = squares + (more - more.mean()).square().sum() + apart.square() * count * more.numel() / total
        self.seen.copy_(torch.stack([total, mean + apart * more.numel() / total, squares]))

    def normalize(self, x_R: torch.Tensor) -> torch.Tensor:
        """Return normalized returns, or unchanged returns if `normalize_returns` is not set."""
        mean, scale = self._moments()
        return (x_R - mean) / scale

    def denormalize(self, value_R: torch.Tensor) -> torch.Tensor:
        """Convert the head's outputs to the scale of the returns."""
        mean, scale = self._moments()
        return value_R * scale + mean

    def _moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean and the standard deviation of all returns seen so far.

        Returns 0 and 1 if `normalize_returns` is not set, or if all returns so far were equal.
        """
        count, mean, squares = self.seen
        return torch.where(squares > 0, mean, 0.0), torch.where(squares > 0, (squares / count).sqrt(), 1.0)
