"""A teacher in every kind of parallel layout, against two Hugging Face models and the written
definitions of the divergences.

The student has a vocabulary of 1,027 ids that no tensor-parallel size divides, the teacher one of
1,024 ids and another hidden size and number of layers, so that the shards of their vocabularies
begin at different ids.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from megatron_rl.batching.minibatches import PackItem
from megatron_rl.config import ModelSettings
from megatron_rl.models.name_mapping import canonical_name
from megatron_rl.rollout.renderer import Renderer
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import SUPPORT
from tests.policy.test_divergence import FORMULAS, TERMS
from tests.support.hf_reference import TEMPERATURE, compute_logits, relative_error, to_released_form
from tests.support.indivisible_vocabulary import add_tokens
from tests.support.packed_example import make_example_items
from tests.support.teacher_layouts import ADVANTAGE, CASES, CLIP, COEF, NUM_ROLLOUTS, TEACHERS, privileged_item

pytestmark = pytest.mark.timeout(900)
ONE, FOUR = ["1,1,1,0,none,odd"], ["2,2,2,1,full,odd", "2,1,1,0,none,odd"]
LONG_IN_FOUR = ["4,1,1,1,full,odd", "1,2,2,0,none,odd"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Create the student and two teachers."""
    folder = tmp_path_factory.mktemp("models")
    make_checkpoint(folder / "tied", init="random", seed=1, heads=8, kv_heads=4, tied=True)
    make_checkpoint(folder / "teacher", init="random", seed=2, heads=8, kv_heads=4, hidden=192, layers=8, tied=False)
    make_checkpoint(folder / "second", init="random", seed=3, heads=8, kv_heads=4, layers=4, tied=True)
    return add_tokens(folder / "tied", folder / "odd"), folder / "teacher", folder / "second"


@pytest.fixture(scope="module")
def results(models: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory, torchrun) -> dict[str, dict]:  # noqa: ANN001
    out = tmp_path_factory.mktemp("layouts")
    return run_layouts(1, ONE, models, out, torchrun) | run_layouts(4, FOUR, models, out, torchrun)


def run_layouts(world: int, layouts: list[str], models: tuple[Path, Path, Path], out: Path, torchrun) -> dict[str, dict]:  # noqa: ANN001
    torchrun(world, SUPPORT / "teacher_layouts.py", *models, out, *layouts, timeout_s=400)
    return {layout: torch.load(out / f"{layout}.pt", weights_only=True) for layout in layouts}


class Truth:
    """Divergences, the teacher's logprobs, and gradients of the student by Hugging Face's models.

    Both models run in float64, one sequence at a time.
    """

    def __init__(self, student: Path, teacher: Path, second: Path) -> None:
        self.renderer = Renderer(ModelSettings(path=str(student)))
        eager = {"experts_implementation": "eager"}  # computes experts in float64
        models = [AutoModelForImageTextToText.from_pretrained(folder, **eager).double() for folder in (student, teacher, second)]
        items = make_example_items(self.renderer)
        self.divergences: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, dict[str, torch.Tensor]] = {}
        for name, top_k in CASES.items():
            found, logprobs, loss = [], [], torch.tensor(0.0, dtype=torch.float64)
            for item in items:
                value, logprob = self.compare(models[:2], item, name, top_k=top_k)
                loss = loss + (item.weight * value).sum()
                found.append(value.detach())
                logprobs.append(logprob.detach())
            self.divergences[name], self.logprobs = torch.cat(found), torch.cat(logprobs)
            self.gradients[name] = self.differentiate(models[0], loss / sum(item.denominator for item in items))
        self.logprobs_of: dict[tuple[int, ...], list[float]] = {}
        loss = torch.tensor(0.0, dtype=torch.float64)
        for item, teacher in zip(items, TEACHERS, strict=True):
            if teacher >= 0:
                value, logprob = self.compare([models[0], models[1 + teacher]], item, "reverse_kl", top_k=0)
                loss = loss + (item.weight * value).sum()
            targets = [token for token, sampled in zip(item.sequence.token_ids, item.sequence.loss_mask, strict=True) if sampled]
            self.logprobs_of[teacher, *targets] = logprob.tolist() if teacher >= 0 else [0.0] * len(targets)
        self.differentiate_self_distillation(models[0], items)
        self.differentiate_both_kinds(models, items)
        self.gradients["mixed"] = self.differentiate(models[0], loss / sum(item.denominator for item in items))

    def differentiate_self_distillation(self, model: torch.nn.Module, items: list[PackItem]) -> None:
        """Compute KL(teacher || student) with the student as the teacher, after its privileged prompt."""
        loss = torch.tensor(0.0, dtype=torch.float64)
        for index, item in enumerate(items):
            read = privileged_item(item, self.renderer, index=index)
            value, _ = self.compare([model, model], item, "forward_kl", top_k=0, read=read)
            loss = loss + (item.weight * value).sum()
        self.gradients["self"] = self.differentiate(model, loss / sum(item.denominator for item in items))

    def differentiate_both_kinds(self, models: list, items: list[PackItem]) -> None:
        """Compute -A log p + coef * KL(teacher || student) on rollouts, and the second term alone on
        demonstrations. All tokens together are the denominator.
        """
        loss = torch.tensor(0.0, dtype=torch.float64)
        for place, item in enumerate(items):
            value, _ = self.compare(models[:2], item, "forward_kl", top_k=0)
            loss = loss + COEF * (item.weight * value).sum()
            if place < NUM_ROLLOUTS:
                loss = loss - ADVANTAGE * (item.weight * self.policy_logprobs(models[0], item)).sum()
        self.gradients["data"] = self.differentiate(models[0], loss / sum(item.denominator for item in items))

    def policy_logprobs(self, model: torch.nn.Module, item: PackItem) -> torch.Tensor:
        """Return the student's logprob of each sampled token, over all ids that may be sampled."""
        logits_TV = compute_logits(model, self.renderer, item.sequence) / TEMPERATURE
        is_banned_V = torch.zeros(logits_TV.shape[1], dtype=torch.bool).index_fill(0, torch.tensor(self.renderer.banned_ids), True)
        logp_TV = logits_TV.masked_fill(is_banned_V, -torch.inf).log_softmax(-1)
        rows = [t for t, mask in enumerate(item.sequence.loss_mask) if mask]
        return torch.stack([logp_TV[t - 1, item.sequence.token_ids[t]] for t in rows])

    def differentiate(self, model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad()
        loss.backward()
        gradients = {key: to_released_form(key, p.grad.clone()) for key, p in model.named_parameters() if p.grad is not None}
        return {canonical_name(key): gradient for key, gradient in gradients.items()}

    def compare(
        self, models: list, item: PackItem, name: str, *, top_k: int, read: PackItem | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the divergence and the teacher's logprob of each sampled token of a sequence.

        The distributions are over the ids that both models have and that may be sampled. The teacher
        reads `read` and has no gradient.
        """
        sequences = [item.sequence, (read or item).sequence]
        rows, rows_of_teacher = ([t - 1 for t, mask in enumerate(each.loss_mask) if mask] for each in sequences)
        policy_TV, teacher_TV = (compute_logits(model, self.renderer, each) for model, each in zip(models, sequences, strict=True))
        logits = [policy_TV[rows] / TEMPERATURE, teacher_TV[rows_of_teacher].detach() / TEMPERATURE]
        num = min(each.shape[1] for each in logits)
        keep = torch.ones(num, dtype=torch.bool)
        keep[[token for token in self.renderer.banned_ids if token < num]] = False
        p, q = (each[:, :num][:, keep].log_softmax(-1).exp() for each in logits)
        place = keep.cumsum(0) - 1
        target = torch.tensor([item.sequence.token_ids[t + 1] for t in rows])
        logprob = q.gather(1, place[target][:, None])[:, 0].log()
        if top_k:
            best = q.topk(top_k + 1, -1).values.log()
            assert (best[:, -2] - best[:, -1]).min() > 1e-4, "rounding does not change the top tokens"
            top = q.topk(top_k, -1).indices
            p, q = (torch.cat([x.gather(1, top), 1 - x.gather(1, top).sum(-1, keepdim=True)], 1) for x in (p, q))
        return TERMS["reverse_kl"](p, q).clamp(max=CLIP).sum(-1) if name == "clipped" else FORMULAS[name](p, q), logprob


@pytest.fixture(scope="module")
def truth(models: tuple[Path, Path, Path]) -> Truth:
    return Truth(*models)


@pytest.mark.parametrize("layout", ONE + FOUR)
def test_logprobs_and_divergences_are_those_of_hf(layout: str, results: dict, truth: Truth) -> None:
    """The divergences are several nats, so that their tolerance is relative."""
    result = results[layout]
    assert (result["logprobs"][result["mask"]] - truth.logprobs).abs().max() <= 1e-5
    for name in CASES:
        assert truth.divergences[name].mean() > 0.1, "the models differ"
        assert (result[name] / truth.divergences[name] - 1).abs().max() <= 1e-5, name
    assert 0 < result["clipped_rows"].mean() < 1 and not any(result[f"{name}_rows"].any() for name in CASES if name != "clipped")


@pytest.mark.parametrize("cut", ["one", "each"])
@pytest.mark.parametrize("layout", ONE + FOUR)
def test_every_gradient_is_that_of_hf(layout: str, cut: str, results: dict, truth: Truth) -> None:
    """Gradients of the student's tensors have a relative error of at most 1e-5, in one micro-batch
    with shared prompts and in one per sequence."""
    for name in (*CASES, "mixed", "top", "self", "data"):
        gradients, expected = results[layout][f"{name}_gradients_{cut}"], truth.gradients["forward_kl" if name == "top" else name]
        assert gradients.keys() == expected.keys()
        worst = max((relative_error(gradient, expected[key]), key) for key, gradient in gradients.items())
        assert worst[0] <= 1e-5, (name, worst)


@pytest.mark.parametrize("layout", ONE + FOUR)
def test_each_sequence_has_its_own_teacher(layout: str, results: dict, truth: Truth) -> None:
    """With two teachers and a sequence without one, each micro-batch has one teacher, and the
    logprobs are those of Hugging Face's model of that teacher."""
    for cut in ("one", "each"):
        batches = results[layout][f"mixed_{cut}"]
        for teacher, target_T, mask_T, logprob_T in batches:
            targets, found = target_T[mask_T].tolist(), logprob_T[mask_T].tolist()
            own = [key for key in truth.logprobs_of if key[0] == teacher and "".join(map(chr, key[1:])) in "".join(map(chr, targets))]
            expected = {key: truth.logprobs_of[key] for key in own}
            assert sum(map(len, expected.values())) == len(found), "the micro-batch has whole sequences of one teacher"
            for key, values in expected.items():
                start = next(place for place in range(len(targets)) if targets[place : place + len(values)] == list(key[1:]))
                assert found[start : start + len(values)] == pytest.approx(values, abs=1e-5)
        assert {teacher for teacher, *_ in batches} <= set(TEACHERS)


def test_demonstrations_have_their_own_micro_batches(results: dict) -> None:
    """Even if one micro-batch could hold all sequences, rollouts and demonstrations are apart."""
    for layout in ONE:
        assert results[layout]["data_one"] == [False, True]


@pytest.mark.long
def test_further_layouts(models: tuple[Path, Path, Path], truth: Truth, tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Further layouts pass the same tests; one of them has data-parallel ranks."""
    results = run_layouts(4, LONG_IN_FOUR, models, tmp_path, torchrun)
    for layout in LONG_IN_FOUR:
        test_logprobs_and_divergences_are_those_of_hf(layout, results, truth)
        for cut in ("one", "each"):
            test_every_gradient_is_that_of_hf(layout, cut, results, truth)
        test_each_sequence_has_its_own_teacher(layout, results, truth)


@pytest.mark.long
def test_divided_experts(tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Student and teacher with experts pass the same tests, if two ranks divide the experts and one
    has fewer micro-batches than the other.
    """
    models, layout = (tmp_path / "student", tmp_path / "teacher"), "1,1,1,0,none,ep2,student"
    for seed, folder in zip((1, 4), models, strict=True):
        make_checkpoint(folder, family="qwen3_vl_moe", init="random", seed=seed, vision_depth=2, layers=3)
    three = (*models, models[1])  # several teachers are refused
    results, truth = run_layouts(2, [layout], three, tmp_path, torchrun), Truth(*three)
    test_logprobs_and_divergences_are_those_of_hf(layout, results, truth)
    for cut in ("one", "each"):
        test_every_gradient_is_that_of_hf(layout, cut, results, truth)
