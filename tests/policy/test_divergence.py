"""Divergences between policy and teacher, with their closed-form gradients, against torch's
autograd of the written formulas in float64."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import log_softmax

from megatron_rl.algo import divergences
from megatron_rl.algo.divergences import DIVERGENCES
from megatron_rl.config import DistillSettings
from megatron_rl.policy.divergence import VocabDivergence
from tests.support.single_process_policy import single_process_world

VOCABULARY, BANNED, ROWS, BETA = 40, 5, 9, 0.3


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with single_process_world():
        assert dist.group.WORLD is not None
        yield dist.group.WORLD


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return sum p log(p / q) of each row."""
    return (p * (p / q).log()).sum(-1)


TERMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "reverse_kl": lambda p, q: p * (p / q).log(),
    "forward_kl": lambda p, q: q * (q / p).log(),
    "jsd": lambda p, q: BETA * q * (q / (BETA * q + (1 - BETA) * p)).log() + (1 - BETA) * p * (p / (BETA * q + (1 - BETA) * p)).log(),
}
"""Terms of the divergences on probabilities; their sum over the outcomes is the divergence."""
FORMULAS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "reverse_kl": lambda p, q: kl(p, q),
    "forward_kl": lambda p, q: kl(q, p),
    "jsd": lambda p, q: BETA * kl(q, BETA * q + (1 - BETA) * p) + (1 - BETA) * kl(p, BETA * q + (1 - BETA) * p),
}
"""Definitions of the divergences on probabilities (GKD, arXiv 2306.13649, section 2)."""


def make_divergence(name: str, group: dist.ProcessGroup, *, temperature: float, top_k: int = 0, clip: float = 0.0) -> VocabDivergence:
    terms = divergences.make_divergence(DistillSettings(teacher="t", divergence=name, jsd_beta=BETA, clip=clip))
    banned_V = torch.arange(VOCABULARY) >= VOCABULARY - BANNED
    return VocabDivergence(terms=terms, banned_V=banned_V, temperature=temperature, group=group, top_k=top_k)


def make_logits(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return 3 * torch.randn(ROWS, VOCABULARY), 3 * torch.randn(ROWS, VOCABULARY)


def outcomes(logits: torch.Tensor, teacher: torch.Tensor, *, temperature: float, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities of single tokens, or of the top tokens and the tail.

    The tail is the sum of the other tokens' probabilities.
    """
    p, q = (log_softmax(x[:, : VOCABULARY - BANNED].double() / temperature, -1).exp() for x in (logits, teacher))
    if top_k:
        top = q.topk(top_k, -1).indices
        p, q = (torch.cat([x.gather(1, top), 1 - x.gather(1, top).sum(-1, keepdim=True)], 1) for x in (p, q))
    return p, q


def expected(name: str, logits: torch.Tensor, teacher: torch.Tensor, *, temperature: float, top_k: int) -> torch.Tensor:
    """Return the divergence by its definition."""
    return FORMULAS[name](*outcomes(logits, teacher, temperature=temperature, top_k=top_k))


@pytest.mark.parametrize("top_k", [0, 1, 6, VOCABULARY - BANNED - 1])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", list(FORMULAS))
def test_values_and_gradients_are_those_of_the_definition(group: dist.ProcessGroup, name: str, temperature: float, top_k: int) -> None:
    logits, teacher = make_logits(seed=top_k)
    weight, found = torch.randn(ROWS), []
    divergence = make_divergence(name, group, temperature=temperature, top_k=top_k)
    given, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    for x, value in ((given, divergence(given, teacher)[0]), (exact, expected(name, exact, teacher, temperature=temperature, top_k=top_k))):
        found.append([value, *torch.autograd.grad((weight * value).sum(), x)])
    assert torch.stack([(a - b).abs().max() for a, b in zip(*found, strict=True)]).max() <= 1e-5
    assert found[0][1][:, -BANNED:].eq(0).all()


@pytest.mark.parametrize("top_k", [0, 6])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", list(TERMS))
def test_clipped_terms_are_constant(group: dist.ProcessGroup, name: str, temperature: float, top_k: int) -> None:
    """D is the sum over outcomes, the tail included, of min(term, limit) in float64, and autograd
    gives its gradient. Some rows have clipped terms, and others have none."""
    logits, teacher = make_logits(seed=1)
    teacher[:3] = logits[:3] + 0.01 * teacher[:3]  # almost equal distributions have small terms
    teacher[3] /= 10
    logits[3] = 20 * teacher[3]  # the tail is probable for the teacher only
    weight, limit, found = torch.randn(ROWS), 0.05, []
    exact = logits.double().requires_grad_()
    p, q = outcomes(exact, teacher, temperature=temperature, top_k=top_k)
    terms = TERMS[name](p, q)
    assert terms.sum(-1).sub(FORMULAS[name](p, q)).abs().max() <= 1e-12 and (terms - limit).abs().min() > 1e-6
    given = logits.clone().requires_grad_()
    value, clipped = make_divergence(name, group, temperature=temperature, top_k=top_k, clip=limit)(given, teacher)
    for x, each in ((given, value), (exact, terms.clamp(max=limit).sum(-1))):
        found.append([each, *torch.autograd.grad((weight * each).sum(), x)])
    assert torch.stack([(a - b).abs().max() for a, b in zip(*found, strict=True)]).max() <= 1e-5
    assert clipped.tolist() == (terms > limit).any(-1).double().tolist()
    assert 0 < clipped.sum() < ROWS and (top_k == 0 or (terms[:, -1] > limit).any()), "some rows, and a tail, are clipped"


@pytest.mark.parametrize("name", list(FORMULAS))
def test_a_limit_that_no_term_reaches_changes_nothing(group: dist.ProcessGroup, name: str) -> None:
    logits, teacher = make_logits(seed=2)
    results = []
    for clip in (0.0, 1e6):
        given = logits.clone().requires_grad_()
        value, clipped = make_divergence(name, group, temperature=0.6, clip=clip)(given, teacher)
        results.append((value, clipped, *torch.autograd.grad(value.sum(), given)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_top_k_of_every_token_equals_the_full_divergence(group: dist.ProcessGroup) -> None:
    logits, teacher = make_logits(seed=3)
    full, top = (make_divergence("reverse_kl", group, temperature=1.0, top_k=k)(logits, teacher)[0] for k in (0, VOCABULARY))
    assert (full - top).abs().max() <= 1e-5
    coarse = make_divergence("reverse_kl", group, temperature=1.0, top_k=4)(logits, teacher)[0]
    assert (coarse <= full + 1e-6).all(), "merging outcomes cannot increase a divergence"


@pytest.mark.parametrize("name", list(FORMULAS))
def test_equal_logits_have_no_divergence_and_no_gradient(group: dist.ProcessGroup, name: str) -> None:
    logits = make_logits(seed=4)[0].requires_grad_()
    value = make_divergence(name, group, temperature=1.0)(logits, logits.detach().clone())[0]
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert value.abs().max() <= 1e-6
    assert gradient.abs().max() <= 1e-6


def test_jsd_approaches_forward_and_reverse_kl(group: dist.ProcessGroup) -> None:
    """JSD / beta tends to KL(teacher || policy), and JSD / (1 - beta) to KL(policy || teacher)."""
    p, q = (log_softmax(x.double() / 10, -1) for x in make_logits(seed=5))
    for beta, scale, limit in ((1e-6, 1e-6, kl(q.exp(), p.exp())), (1 - 1e-6, 1e-6, kl(p.exp(), q.exp()))):
        terms = DIVERGENCES["jsd"](DistillSettings(teacher="t", divergence="jsd", jsd_beta=beta))
        assert (terms(p, q)[0].sum(-1) / scale - limit).abs().max() <= 1e-5
