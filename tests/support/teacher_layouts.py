"""Computes divergences from a teacher in several parallel layouts. Run under torchrun by
test_teacher.py.

    teacher_layouts.py STUDENT TEACHER SECOND_TEACHER OUT LAYOUT ...

A layout is written as in parallel_layouts.py, with the student's name as the model.
"""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.algo.distill import DistillTerm, read_divergence
from megatron_rl.algo.divergences import DIVERGENCES, make_divergence
from megatron_rl.algo.objective import make_policy_objective, make_sft_objective
from megatron_rl.batching.minibatches import PackItem
from megatron_rl.batching.packing import pack
from megatron_rl.batching.privileged import PrivilegedPrompt
from megatron_rl.config import AlgoSettings, DistillSettings
from megatron_rl.distributed.world import connect, read_world
from megatron_rl.models.hf_config import read_spec
from megatron_rl.policy.divergence import TeacherTerm
from megatron_rl.policy.parallel import Layout, build_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.policy.server_teacher import ServerTeacher
from megatron_rl.policy.teacher import Teacher, TeacherModel, load_teacher_model
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import LossInputs, LossMetrics
from tests.support.parallel_layouts import LayoutCase, compute_gradients, destroy_layout, make_example, make_policy

CASES = {"reverse_kl": 0, "forward_kl": 12, "jsd": 0, "clipped": 0}
"""Number of top tokens of each tested divergence; 0 for the whole vocabulary. `clipped` is the
reverse KL divergence with terms of at most CLIP."""
CLIP = 2.0
NUM_ROLLOUTS, ADVANTAGE, COEF = 4, 0.7, 0.5
"""Number of sequences that are rollouts if the others are demonstrations, the advantage of their
tokens, and the coefficient of the divergence.
"""
BETA = 0.3
TEACHERS = (0, 1, 1, 0, 1, -1, 1)
"""Teacher of each sequence of the example if two teachers are used. Two sequences of the second
teacher have the same prompt.
"""


def run_layout(student: Path, teacher: Path, second: Path, out: Path, text: str) -> None:
    case = LayoutCase.parse(text)
    layout = build_layout(case.parallel_settings(), seed=0)
    renderer, contexts = make_example(student)
    policy = make_policy(student, renderer, layout, case, lr=0.1, eps=1e-4)
    whole = pack(contexts, image_token_id=renderer.image_token_id, positions=read_spec(student).rope_positions, multiple_of=case.tp)
    result: dict[str, object] = {"mask": whole.mask_T}
    for name, top_k in CASES.items():
        how = {"divergence": "reverse_kl", "clip": CLIP} if name == "clipped" else {"divergence": name}
        terms = make_divergence(DistillSettings(teacher=str(teacher), jsd_beta=BETA, **how))
        model = load_teacher_model(str(teacher), layout, dtype="float32")
        policy.teachers = [Teacher(model, layout, policy=policy.distribution, term=TeacherTerm(divergence=terms, top_k=top_k))]
        seen: list[torch.Tensor] = []

        def distill(rows: LossInputs, seen: list[torch.Tensor] = seen) -> tuple[torch.Tensor, LossMetrics]:
            assert rows.divergence_R is not None and rows.clipped_R is not None
            seen.append(rows.divergence_R.detach())
            seen.append(rows.clipped_R)
            return (rows.weight_R * rows.divergence_R).sum(), LossMetrics(sums={}, maxima={})

        result["logprobs"] = policy.logprobs([whole], weights="teacher")[0]
        compute_gradients(policy, [whole] * layout.vpp, distill)  # an interleaved pipeline needs a multiple of pp micro-batches
        result[name], result[f"{name}_rows"] = seen[:2] if seen else (None, None)
        for cut, max_tokens in (("one", 10_000), ("each", 1)):
            batches = policy.pack(contexts, max_tokens=max_tokens)
            policy.logprobs(batches, weights="teacher")
            result[f"{name}_gradients_{cut}"] = compute_gradients(policy, batches, distill)
    result |= use_top_tokens(policy, layout, teacher, contexts)
    result |= use_demonstrations(policy, layout, teacher, contexts)
    result |= use_privileged_prompts(policy, layout, contexts, renderer)
    if layout.ep == 1:  # ranks that divide experts need equally many passes, so they have one teacher
        result |= use_two_teachers(policy, layout, (teacher, second), contexts)
    if layout.is_last_stage and layout.tp_rank == 0 and layout.dp_rank == 0:
        torch.save(result, out / f"{text}.pt")
    destroy_layout(policy)


def use_top_tokens(policy: Policy, layout: Layout, path: Path, contexts: list[PackItem]) -> dict[str, object]:
    """Return gradients with the top tokens of the teacher, as a server returns them."""
    name, result = "forward_kl", {}
    term = TeacherTerm(divergence=DIVERGENCES[name](DistillSettings(teacher="t", divergence=name)), top_k=CASES[name])
    model = load_teacher_model(str(path), layout, dtype="float32")
    local = Teacher(model, layout, policy=policy.distribution, term=term)
    server = ServerTeacher(policy=local._distribution, term=term)  # leaves out the ids that the teacher lacks, as Truth does
    loss = make_sft_objective(distill=DistillTerm(coef=1.0, divergence=read_divergence), teacher_alone=True)
    for cut, max_tokens in (("one", 10_000), ("each", 1)):
        batches = policy.pack(contexts, max_tokens=max_tokens)
        local.logprobs(batches)
        for batch in batches:
            if batch.teacher_hidden_RH is not None:
                logits_RV = local.logits(batch.teacher_hidden_RH).masked_fill(local._distribution.banned_V, -torch.inf)
                parts = [torch.empty_like(logits_RV) for _ in range(layout.tp)]
                dist.all_gather(parts, logits_RV, group=layout.tp_group)
                logq_RV = (torch.cat(parts, 1) / policy.distribution.temperature).log_softmax(-1)
                logq_RK, ids_RK = logq_RV.topk(CASES[name], -1)
                ids_RK[: len(ids_RK) // 2] = ids_RK[: len(ids_RK) // 2].flip(1)  # their order has no effect
                logq_RK[: len(ids_RK) // 2] = logq_RK[: len(ids_RK) // 2].flip(1)
                batch.teacher_hidden_RH, batch.teacher_top_RK = None, (ids_RK, logq_RK)
        policy.teachers = [server]
        result[f"top_gradients_{cut}"] = compute_gradients(policy, batches, loss)
    return result


def use_demonstrations(policy: Policy, layout: Layout, path: Path, contexts: list[PackItem]) -> dict[str, object]:
    """Return gradients of GRPO on the first sequences, with the others as demonstrations."""
    terms, result = make_divergence(DistillSettings(teacher="t", divergence="forward_kl")), {}
    model = load_teacher_model(str(path), layout, dtype="float32")
    policy.teachers = [Teacher(model, layout, policy=policy.distribution, term=TeacherTerm(divergence=terms))]
    loss = make_policy_objective(AlgoSettings(), distill=DistillTerm(coef=COEF, divergence=read_divergence))
    items = [replace(item, is_demonstration=place >= NUM_ROLLOUTS) for place, item in enumerate(contexts)]
    for cut, max_tokens in (("one", 10_000), ("each", 1)):
        batches = policy.pack(items, max_tokens=max_tokens)
        for batch in batches:
            batch.advantage_T = ADVANTAGE * batch.mask_T
        policy.logprobs(batches, weights="teacher")
        result[f"data_gradients_{cut}"] = compute_gradients(policy, batches, loss)
        result[f"data_{cut}"] = [batch.is_demonstration for batch in batches]
    return result


def privileged_item(item: PackItem, renderer: Renderer, *, index: int) -> PackItem:
    """Return what the teacher reads of a sequence of the example; one sequence has no information."""
    prompt = PrivilegedPrompt("", lambda text: renderer.tokenizer.encode(text, add_special_tokens=False), renderer.end_id)
    text = "" if index == 3 else "Hint: " + "one two " * (1 + index)
    return replace(item, sequence=prompt.insert(item.sequence, text))


def use_privileged_prompts(policy: Policy, layout: Layout, contexts: list[PackItem], renderer: Renderer) -> dict[str, object]:
    """Return gradients with the policy as its own teacher, which reads longer prompts."""
    term, result = TeacherTerm(divergence=DIVERGENCES["forward_kl"](DistillSettings(teacher="t", divergence="forward_kl"))), {}
    network = policy.network
    model = TeacherModel(chunks=network.chunks, pipeline=network.pipeline, vocab_size=policy.spec.vocab_size, loaded=nullcontext)
    policy.make_teacher = lambda: Teacher(model, layout, policy=policy.distribution, term=term)
    policy.teach_itself()
    loss = make_sft_objective(distill=DistillTerm(coef=1.0, divergence=read_divergence), teacher_alone=True)
    index = {id(item.sequence): place for place, item in enumerate(contexts)}
    for cut, max_tokens in (("one", 10_000), ("each", 1)):
        shares = policy.shard_across_dp(contexts, max_tokens=max_tokens)
        read = [[[privileged_item(item, renderer, index=index[id(item.sequence)]) for item in part] for part in parts] for parts in shares]
        batches = policy.pack_local(shares)
        for batch, other in zip(batches, policy.pack_local(read), strict=True):
            batch.teacher_batch = other
        policy.logprobs(batches, weights="teacher")
        result[f"self_gradients_{cut}"] = compute_gradients(policy, batches, loss)
    return result


def use_two_teachers(policy: Policy, layout: Layout, teachers: tuple[Path, Path], contexts: list[PackItem]) -> dict[str, object]:
    """Return divergences, logprobs and gradients if each sequence has a teacher of its own."""
    term, result = TeacherTerm(divergence=DIVERGENCES["reverse_kl"](DistillSettings(teacher="t"))), {}
    models = [load_teacher_model(str(path), layout, dtype="float32") for path in teachers]
    policy.teachers = [Teacher(model, layout, policy=policy.distribution, term=term) for model in models]
    items = [replace(item, teacher=teacher) for item, teacher in zip(contexts, TEACHERS, strict=True)]
    loss = make_sft_objective(distill=DistillTerm(coef=1.0, divergence=read_divergence), teacher_alone=True)
    for cut, max_tokens in (("one", 10_000), ("each", 1)):
        batches = policy.pack(items, max_tokens=max_tokens)
        for batch, logprob_T in zip(batches, policy.logprobs(batches, weights="teacher"), strict=True):
            batch.teacher_logprob_T = logprob_T
        result[f"mixed_{cut}"] = [(batch.teacher, batch.target_T, batch.mask_T, batch.teacher_logprob_T) for batch in batches]
        result[f"mixed_gradients_{cut}"] = compute_gradients(policy, batches, loss)
    return result


def main() -> None:
    student, teacher, second, out = map(Path, sys.argv[1:5])
    connect(read_world(), timeout_s=240)
    for layout in sys.argv[5:]:
        run_layout(student, teacher, second, out, layout)


if __name__ == "__main__":
    main()
