"""Return statistics of a value head against numpy's statistics of all returns at once."""

import numpy as np
import torch

from megatron_rl.policy.value_head import ValueHead


def test_statistics_of_steps_are_those_of_all_returns() -> None:
    """Statistics updated step by step equal those of all returns, for steps of different sizes and
    means and a step without returns."""
    generator = np.random.default_rng(0)
    steps = [[3.0], list(generator.normal(5, 2, 7)), [], list(generator.normal(-20, 0.5, 40))]
    head = ValueHead(4, [], dtype=torch.float32, normalize_returns=True)
    for returns in steps:
        head.update_return_stats(returns)
    every = np.concatenate([np.array(returns) for returns in steps])
    units = head.normalize(torch.tensor(every))
    assert np.allclose(units, (every - every.mean()) / every.std(), rtol=0, atol=1e-9)
    assert torch.allclose(head.denormalize(units), torch.tensor(every), rtol=0, atol=1e-9)
