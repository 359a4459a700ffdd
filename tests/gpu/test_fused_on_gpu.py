"""This project's fused functions on a GPU against the same functions in plain torch on a CPU."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_rl.algo.divergences import make_divergence
from megatron_rl.config import DistillSettings
from megatron_rl.memory_plan.activations import VALUES_PER_LOGIT
from megatron_rl.policy.divergence import VocabDivergence
from megatron_rl.policy.fused import fused_swiglu, gated_mlp, rotate
from megatron_rl.policy.logprobs import TokenDistribution, vocab_parallel_logprobs

pytestmark = pytest.mark.gpu
VOCABULARY = 151_936


def assert_near(ours: list[torch.Tensor], truth: list[torch.Tensor], *, bound: float) -> None:
    far = [
        float((a.detach().double().cpu() - b.detach().double()).norm() / b.detach().double().norm())
        for a, b in zip(ours, truth, strict=True)
    ]
    assert all(each <= bound for each in far), far


def test_the_rotation_is_plain_torchs() -> None:
    """Results and gradients of two sizes equal those in float64 up to bfloat16 rounding."""
    for tokens in (7, 300):
        inputs = [torch.randn(tokens, heads, 128, dtype=torch.float64).bfloat16() for heads in (4, 2)]
        angles = torch.randn(tokens, 64).repeat(1, 2)
        found = []
        for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float64)):
            q, k = (x.to(device, dtype).requires_grad_() for x in inputs)
            rotated = rotate(q, k, angles.cos().to(device), angles.sin().to(device))
            gradients = torch.autograd.grad(sum(x.double().square().sum() for x in rotated), (q, k))
            found.append([*rotated, *gradients])
        assert_near(*found, bound=5e-3)


@pytest.mark.parametrize("width", [3420, 3456])
def test_the_gated_mlp_is_plain_torchs(width: int) -> None:
    """Results and gradients equal those in float64 up to bfloat16 rounding."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(1280, width), nn.Linear(1280, width), nn.Linear(width, 1280)]).bfloat16()
    x, found = torch.randn(512, 1280).bfloat16(), []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float64)):
        layers, given = layers.to(device, dtype), x.to(device, dtype).requires_grad_()
        out = gated_mlp(given, *layers)
        found.append([out, *torch.autograd.grad(out.double().square().sum(), [given, *layers.parameters()])])
    assert_near(*found, bound=2e-2)


@pytest.mark.parametrize("width", [48, 2752])
def test_the_activation_is_plain_torchs(width: int) -> None:
    """The result and the gradient equal those in float64 up to one rounding to bfloat16, for two
    numbers of tokens."""
    for tokens in (300, 301):
        inputs = torch.randn(tokens, 1, 2 * width, dtype=torch.float64).bfloat16()
        weight, found = torch.randn(tokens, 1, width).bfloat16(), []
        for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float64)):
            x = inputs.to(device, dtype).requires_grad_()
            gate, up = x.chunk(2, -1)
            out = fused_swiglu(x) if x.is_cuda else torch.nn.functional.silu(gate) * up
            found.append([out, *torch.autograd.grad(out, x, weight.to(device, dtype))])
        assert_near(*found, bound=3e-3)


@pytest.mark.parametrize(("name", "top_k", "clip"), [("reverse_kl", 0, 0.0), ("jsd", 64, 0.0), ("reverse_kl", 64, 0.01)])
def test_divergences_are_those_of_a_cpu(world: None, name: str, top_k: int, clip: float) -> None:
    """Divergences from a teacher near the policy, and their gradients, equal those of a CPU.

    Both are computed in fp32. If the two distributions have hardly a token in common, gradients
    cancel, and a relative bound on them would mean nothing.
    """
    logits = 3 * torch.randn(64, VOCABULARY)
    teacher = logits + torch.randn(64, VOCABULARY)
    banned, found = torch.zeros(VOCABULARY, dtype=torch.bool), []
    banned[-9:] = True
    settings, weight = DistillSettings(teacher="unused", divergence=name, clip=clip), torch.randn(64)
    for device in ("cuda", "cpu"):
        divergence = VocabDivergence(
            terms=make_divergence(settings), banned_V=banned.to(device), temperature=0.9, group=dist.group.WORLD, top_k=top_k
        )
        given = logits.to(device).requires_grad_()
        value, clipped = divergence(given, teacher.to(device))
        found.append([value + clipped, *torch.autograd.grad((weight.to(device) * value).sum(), given)])
    assert_near(*found, bound=1e-5)


def test_logprobs_are_plain_torchs(world: None) -> None:
    """Logprobs, entropies and the gradient of the logits equal those in float64."""
    logits, target = 3 * torch.randn(64, VOCABULARY), torch.randint(VOCABULARY - 9, (64,))
    banned, found = torch.zeros(VOCABULARY, dtype=torch.bool), []
    banned[-9:] = True
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        given = logits.to(device, dtype).requires_grad_()
        how = {"banned_V": banned.to(device), "temperature": 0.9, "first_id": 0, "group": dist.group.WORLD}
        logprob, entropy = vocab_parallel_logprobs(given, target.to(device), **how)
        found.append([logprob, entropy, *torch.autograd.grad((logprob + entropy.square()).sum(), given)])
    assert_near(*found, bound=1e-5)


def test_logits_cost_what_the_plan_says(world: None) -> None:
    """The peak memory of logits is two values per entry of one block."""
    block, hidden = 1024, 64
    head = nn.Linear(hidden, VOCABULARY, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    distribution = TokenDistribution(torch.zeros(VOCABULARY, dtype=torch.bool, device="cuda"), 1.0, 0, dist.group.WORLD, block)

    def peak() -> int:
        hidden_RH = torch.randn(4 * block, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        logprob_R, entropy_R = distribution(head, hidden_RH, torch.zeros(4 * block, dtype=torch.long, device="cuda"))
        (logprob_R.sum() + entropy_R.sum()).backward()
        return torch.cuda.max_memory_allocated() - before

    peak()  # allocates cuBLAS's workspace
    assert peak() == pytest.approx(VALUES_PER_LOGIT * 2 * block * VOCABULARY, rel=0.1)
