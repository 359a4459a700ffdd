"""A teacher on the emulated device: its weights leave the device, its numbers are those of a policy
with the same weights, and it adds no wait to an update. A merge of checkpoints has no weights of
its own there.
"""

from collections import Counter
from pathlib import Path

import pytest
import torch

from megatron_rl.algo.distill import make_distill_term
from megatron_rl.algo.divergences import DIVERGENCES
from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.build import merge_checkpoints_as_teacher
from megatron_rl.config import AlgoSettings, DistillSettings, MergeSettings, OptimSettings, RunSettings, Settings
from megatron_rl.policy.divergence import TeacherTerm
from megatron_rl.policy.teacher import Teacher, load_teacher_model
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.support.cuda import device
from tests.support.packed_example import make_example_items
from tests.support.single_process_policy import make_policy_and_renderer, single_process_world
from tests.support.update_waits import UPDATE_WAITS, count_by_file


@pytest.mark.parametrize("support", ["full", "top_k"])
def test_a_teacher_leaves_the_device_and_adds_no_wait(support: str, random_model: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "teacher", init="random", seed=2, layers=8)
    settings = DistillSettings(teacher=str(tmp_path / "teacher"), support=support, top_k=5)
    with single_process_world():
        policy, renderer = make_policy_and_renderer(random_model, OptimSettings(), temperature=0.7)
        reference, _ = make_policy_and_renderer(tmp_path / "teacher", OptimSettings(), temperature=0.7)
        batches = policy.pack(make_example_items(renderer), max_tokens=200)
        assert len(batches) > 2
        before = torch.cuda.memory_allocated()
        term = TeacherTerm(divergence=DIVERGENCES["reverse_kl"](settings), top_k=5 if support == "top_k" else 0)
        model = load_teacher_model(settings.teacher, policy.layout, dtype="float32")
        policy.teachers = [Teacher(model, policy.layout, policy=policy.distribution, term=term)]
        output_bytes = policy.distribution.banned_V.numel() * policy.spec.hidden_size * 4
        assert torch.cuda.memory_allocated() - before < 1.1 * output_bytes + 10_000
        found = policy.logprobs(batches, weights="teacher")
        assert all(batch.teacher_hidden_RH is not None and not batch.teacher_hidden_RH.is_cuda for batch in batches)
        for batch, logprob_T, expected_T in zip(batches, found, reference.logprobs(batches), strict=True):
            assert torch.equal(logprob_T, expected_T)
            batch.teacher_logprob_T = logprob_T
        loss = make_policy_objective(AlgoSettings(name="distill"), distill=make_distill_term(settings, step=0))
        first = policy.update(batches, loss, step=0)
        device.waits.clear()
        second = policy.update(batches, loss, step=1)
        assert count_by_file(device.waits) == Counter(UPDATE_WAITS)
        assert 0 < second["distill/divergence"] < first["distill/divergence"]


def test_merged_checkpoints_are_not_on_the_device(random_model: Path) -> None:
    """The mean of two checkpoints has the logprobs of a policy with these weights, bit for bit, and
    device memory grows by an output layer."""
    with single_process_world():
        policy, renderer = make_policy_and_renderer(random_model, OptimSettings(lr=1e-2))
        other, _ = make_policy_and_renderer(random_model, OptimSettings())
        batches = policy.pack(make_example_items(renderer), max_tokens=200)
        before = torch.cuda.memory_allocated()
        settings = Settings(
            model=policy.settings, run=RunSettings(dir="there"), distill=DistillSettings(merge=MergeSettings(method="mean"))
        )
        merge_checkpoints_as_teacher(settings, policy.layout, policy)
        own = list(policy.network.chunks.parameters())
        sums = [torch.zeros_like(parameter) for parameter in other.network.chunks.parameters()]
        for number in range(2):
            with torch.no_grad():
                for parameter, total in zip(own, sums, strict=True):
                    parameter.add_(0.01 * torch.sin(torch.arange(parameter.numel(), device=parameter.device) + number).view_as(parameter))
                    total.lerp_(parameter, 1 / (number + 1))
            policy.merge_checkpoint()
        weights = [parameter.detach().clone() for parameter in own]
        with torch.no_grad():
            for parameter, total in zip(other.network.chunks.parameters(), sums, strict=True):
                parameter.copy_(total)
        for found, expected in zip(policy.logprobs(batches, weights="teacher"), other.logprobs(batches), strict=True):
            assert torch.equal(found, expected)
        assert all(torch.equal(parameter, kept) for parameter, kept in zip(own, weights, strict=True))
        del weights, sums
        output_bytes = policy.distribution.banned_V.numel() * policy.spec.hidden_size * 4
        grown = torch.cuda.memory_allocated() - before
        assert grown < 1.5 * output_bytes + 10_000
