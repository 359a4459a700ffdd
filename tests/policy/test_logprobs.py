"""Logprobs, entropies and their closed-form gradient against torch's log_softmax in float64."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import log_softmax

from megatron_rl.policy.logprobs import TokenDistribution, vocab_parallel_logprobs
from tests.support.single_process_policy import single_process_world

VOCABULARY, BANNED = 50, 5


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with single_process_world():
        assert dist.group.WORLD is not None
        yield dist.group.WORLD


def banned_mask() -> torch.Tensor:
    """Return a mask of the last ids."""
    return torch.arange(VOCABULARY) >= VOCABULARY - BANNED


def truth(logits: torch.Tensor, target: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logprobs and entropies by torch's log_softmax over the ids that are not banned."""
    logp = log_softmax(logits[:, :-BANNED] / temperature, -1)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.known_failure("temperature-ignored")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_gradients_are_those_of_log_softmax(group: dist.ProcessGroup, temperature: float) -> None:
    """Logprobs, entropies and the gradient of a weighted sum of both equal those in float64."""
    torch.manual_seed(0)
    logits, target = 4 * torch.randn(9, VOCABULARY), torch.randint(VOCABULARY - BANNED, (9,))
    factors, found = torch.randn(2, 9), []
    given, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    how = {"banned_V": banned_mask(), "temperature": temperature, "first_id": 0, "group": group}
    for x, pair in ((given, vocab_parallel_logprobs(given, target, **how)), (exact, truth(exact, target, temperature))):
        found.append([*pair, *torch.autograd.grad((factors * torch.stack(pair)).sum(), x)])
    assert all((a - b).abs().max() <= 1e-5 for a, b in zip(*found, strict=True))
    assert found[0][2][:, -BANNED:].eq(0).all()


def test_blocks_do_not_change_the_gradient(group: dist.ProcessGroup) -> None:
    """With blocks of two rows, results and the gradient of the hidden states are the same as with a
    single block."""
    torch.manual_seed(1)
    head, target = torch.nn.Linear(8, VOCABULARY), torch.randint(VOCABULARY - BANNED, (7,))
    hidden, found = torch.randn(7, 8), []
    for rows in (2, 100):
        x = hidden.clone().requires_grad_()
        pair = TokenDistribution(banned_mask(), 1.0, 0, group, rows)(head, x, target)
        found.append([*pair, *torch.autograd.grad((pair[0] + pair[1].square()).sum(), x)])
    assert all((a - b).abs().max() <= 1e-6 for a, b in zip(*found, strict=True))
