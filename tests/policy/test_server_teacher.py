"""Top tokens from servers against a teacher in this process, and against the written definition."""

from array import array
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megatron_rl.algo.divergences import DIVERGENCES
from megatron_rl.batching.minibatches import PackItem
from megatron_rl.batching.packing import gather_teacher_top, pack
from megatron_rl.config import DistillSettings
from megatron_rl.policy.divergence import TeacherTerm
from megatron_rl.policy.logprobs import TokenDistribution
from megatron_rl.policy.server_teacher import ServerTeacher
from megatron_rl.types import Rollout, TokenSequence, TopTokens
from tests.policy.test_divergence import BANNED, BETA, FORMULAS, VOCABULARY, make_divergence, make_logits
from tests.support.single_process_policy import single_process_world

ALLOWED = VOCABULARY - BANNED


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with single_process_world():
        assert dist.group.WORLD is not None
        yield dist.group.WORLD


def make_teacher(name: str, group: dist.ProcessGroup, *, temperature: float, top_k: int) -> ServerTeacher:
    policy = TokenDistribution(torch.arange(VOCABULARY) >= ALLOWED, temperature, 0, group, 1000)
    terms = DIVERGENCES[name](DistillSettings(teacher="t", divergence=name, jsd_beta=BETA))
    return ServerTeacher(policy=policy, term=TeacherTerm(divergence=terms, top_k=top_k))


@pytest.mark.parametrize("top_k", [1, 6, 12, ALLOWED])
@pytest.mark.parametrize("name", list(FORMULAS))
def test_a_server_of_the_same_distribution_has_the_same_divergence(group: dist.ProcessGroup, name: str, top_k: int) -> None:
    """Values and gradients equal those of a teacher in this process, if both have the same
    distribution over the ids that the policy samples."""
    logits, teacher = (x / 2 for x in make_logits(seed=top_k))  # probable tails, which fp32 resolves
    logq_RV = teacher.masked_fill(torch.arange(VOCABULARY) >= ALLOWED, -torch.inf).div(0.6).log_softmax(-1)
    top = logq_RV.topk(top_k, -1)
    weight, found = torch.randn(len(logits)), []
    local, server = make_divergence(name, group, temperature=0.6, top_k=top_k), make_teacher(name, group, temperature=0.6, top_k=top_k)
    for compute in (lambda x: local(x, teacher)[0], lambda x: server._diverge(x, top.indices, top.values)[0]):
        given = logits.clone().requires_grad_()
        value = compute(given)
        found.append([value, *torch.autograd.grad((weight * value).sum(), given)])
    assert torch.stack([(a - b).abs().max() for a, b in zip(*found, strict=True)]).max() <= 1e-5


@pytest.mark.parametrize("name", list(FORMULAS))
def test_ids_that_are_never_sampled_belong_to_the_tail(group: dist.ProcessGroup, name: str) -> None:
    """The teacher's distribution includes the banned ids, one row has two of them among its top
    tokens, and an id that the policy lacks is not an outcome. The definition is in float64."""
    logits, teacher = (x / 2 for x in make_logits(seed=1))
    teacher[:, ALLOWED:] = -4.0
    teacher[0, ALLOWED : ALLOWED + 2] = 8.0
    logq_RV = teacher.double().log_softmax(-1)
    top = logq_RV.topk(6, -1)
    ids_RK, logq_RK = top.indices.clone(), top.values.float()
    ids_RK[1, 5], ids_RK[2, 5], logq_RK[2, 5] = VOCABULARY + 3, -1, -torch.inf
    exact = logits.double().requires_grad_()
    p_RV = exact[:, :ALLOWED].log_softmax(-1).exp()
    rows = []
    for row, ids in enumerate(ids_RK.tolist()):
        own = [each for each in ids if 0 <= each < ALLOWED]
        p, q = p_RV[row, own], logq_RV[row, own].exp()
        rows.append(FORMULAS[name](torch.cat([p, 1 - p.sum(0, keepdim=True)]), torch.cat([q, 1 - q.sum(0, keepdim=True)])))
    assert [sum(0 <= each < ALLOWED for each in ids) for ids in ids_RK[:3].tolist()] == [4, 5, 5]
    given = logits.clone().requires_grad_()
    value, expected = make_teacher(name, group, temperature=1.0, top_k=6)._diverge(given, ids_RK, logq_RK)[0], torch.stack(rows)
    assert (value - expected).abs().max() <= 1e-5
    gradients = [torch.autograd.grad(x.sum(), leaf)[0] for x, leaf in ((value, given), (expected, exact))]
    assert (gradients[0] - gradients[1]).abs().max() <= 1e-5


def test_rows_of_a_packed_batch_have_their_own_top_tokens() -> None:
    """Two sequences share a prompt, the second one has two turns, and one begins with the response
    of another one; every row has the tokens of its target."""
    masks = {0: [0, 0, 0, 1, 1, 1], 1: [0, 0, 0, 1, 0, 1], 2: [0, 0, 0, 0, 0, 1]}
    ids = {0: [5, 6, 7, 1, 2, 3], 1: [5, 6, 7, 3, 8, 4], 2: [5, 6, 7, 1, 9, 2]}
    rollouts = []
    for number, mask in masks.items():
        sequence = TokenSequence(ids[number], mask, [0.0] * len(mask), [-1] * len(mask))
        places = [place for place, sampled in enumerate(mask) if sampled]
        sequence.teacher_top = TopTokens(
            2,
            array("i", [x for place in places for x in (100 * number + place, -1)]),
            array("f", [-1.0 * place for place in places for _ in "ab"]),
        )
        rollouts.append(Rollout("t", "0", 0, number, sequences=[sequence]))
    items = [PackItem(rollout.sequences[0], origin=(number, 0)) for number, rollout in enumerate(rollouts)]
    straight = lambda token_ids, images: torch.arange(len(token_ids)).expand(3, -1)  # noqa: E731
    batch = pack([items[0], items[2], items[1]], image_token_id=99, positions=straight, multiple_of=4, share_prompts=True)
    assert len(batch.prefix_S) > 4, "the prompt and a response are shared"
    found_RK, logprob_RK = gather_teacher_top(rollouts, batch)
    assert found_RK.tolist() == [[3, -1], [4, -1], [5, -1], [205, -1], [103, -1], [105, -1]]
    assert logprob_RK[:, 0].tolist() == [-3.0, -4.0, -5.0, -5.0, -3.0, -5.0]
