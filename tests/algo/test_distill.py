"""Terms of distillation by hand, and their expected gradients by enumeration."""

import math
import re
from dataclasses import replace

import pytest
import torch

from megatron_rl.algo.algorithms import ALGORITHMS
from megatron_rl.algo.distill import ESTIMATES, add_teacher_rewards, check_distill, compute_distill_coef, make_distill_term, merges_after
from megatron_rl.algo.divergences import DIVERGENCES
from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.config import (
    AlgoSettings,
    CriticSettings,
    DistillSettings,
    MergeSettings,
    ModelSettings,
    RunSettings,
    Settings,
    TeacherServerSettings,
)
from megatron_rl.observe.step_metrics import merge_update_metrics
from megatron_rl.run.history import History
from megatron_rl.training_loop import settings_at_step
from megatron_rl.types import TokenSequence
from tests.support.random_loss_inputs import make_loss_inputs, make_tensor
from tests.support.rollout_factory import make_rollout


def test_the_coefficient_changes_linearly() -> None:
    changing = DistillSettings(teacher="t", coef=0.5, final_coef=0.1, decay_steps=4)
    assert [compute_distill_coef(changing, step=step) for step in (0, 1, 4, 9)] == pytest.approx([0.5, 0.4, 0.1, 0.1], abs=1e-15)
    assert [compute_distill_coef(DistillSettings(teacher="t", coef=0.5), step=step) for step in (0, 100)] == [0.5, 0.5]


def test_the_divergence_is_added_to_the_loss_by_hand() -> None:
    """Two tokens with weights 1 and 2 and advantages 0: the loss is the weighted divergence, 0.5 *
    (1 * 3 + 2 * 0.25), and its gradient 0.5 times the weights."""
    rows = make_loss_inputs(
        [0.0, 0.0], [0.0, 0.0], weight=[1.0, 2.0], divergence=[3.0, 0.25], clipped=[1.0, 0.0], teacher_logprob=[-1.5, -2.5]
    )
    assert rows.divergence_R is not None
    rows.divergence_R.requires_grad_()
    term = make_distill_term(DistillSettings(teacher="t", coef=0.5), step=0)
    loss, metrics = make_policy_objective(AlgoSettings(name="distill"), distill=term)(rows)
    loss.backward()
    assert (loss.item(), rows.divergence_R.grad.tolist()) == (1.75, [0.5, 1.0])
    assert metrics.sums["distill/divergence"].item() == 3.25 and metrics.sums["distill/clipped_fraction"].item() == 1.0
    assert metrics.sums["distill/reverse_kl"].item() == 1.0  # -1 + 1.5 and -2 + 2.5


@pytest.mark.parametrize("name", list(ESTIMATES))
def test_estimates_have_the_expected_gradient_of_the_divergence(name: str) -> None:
    """Enumerated over all tokens of a categorical distribution, the expected gradient of the
    estimate from the sampled token is the gradient of the full divergence."""
    logits_V = make_tensor(0.3, -1.2, 0.8, 0.0, 2.0).requires_grad_()
    log_p_V, log_q_V = logits_V.log_softmax(0), make_tensor(-0.5, 0.4, 1.1, 0.2, -1.0).log_softmax(0)
    expected = (log_p_V.detach().exp() * ESTIMATES[name](log_p_V, log_q_V)).sum()
    p_V, q_V = log_p_V.exp(), log_q_V.exp()
    full = {"reverse_kl": (p_V * (log_p_V - log_q_V)).sum(), "forward_kl": (q_V * (log_q_V - log_p_V)).sum()}[name]
    found, wanted = (torch.autograd.grad(value, logits_V, retain_graph=True)[0] for value in (expected, full))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)


def test_the_sampled_term_reads_the_teachers_logprobs() -> None:
    """k2 of a token with logprob -1 and teacher logprob -3 is 2."""
    rows = make_loss_inputs([0.0], [0.0], teacher_logprob=[-3.0])
    term = make_distill_term(DistillSettings(teacher="t", support="sampled"), step=0)
    assert term is not None
    assert term.divergence(rows).item() == 2.0


def test_rewards_of_the_teacher_by_hand() -> None:
    """Each sampled token's advantage changes by coef * (teacher logprob - old logprob); observed
    tokens keep 0, and rollouts that are not trained on are left alone."""
    trained, filtered = make_rollout(0, 1.0, lengths=(2,)), make_rollout(0, 0.0, lengths=(2,))
    observed = TokenSequence(token_ids=[5, 6], loss_mask=[0, 0])
    filtered.filter_reason = "surplus"
    for rollout in (trained, filtered):
        (sequence,) = rollout.sequences
        places = [place for place, sampled in enumerate(sequence.loss_mask) if sampled]
        for column, values in (("advantages", (2.0, 2.0)), ("old_logprobs", (-1.0, -2.0)), ("teacher_logprobs", (-0.5, -4.0))):
            numbers = [0.0] * len(sequence.token_ids)
            for place, value in zip(places, values, strict=True):
                numbers[place] = value
            sequence.set_column(column, numbers)
    observed.set_column("advantages", [0.0, 0.0])  # no model read this sequence: it has no sampled tokens
    trained.sequences.append(observed)
    add_teacher_rewards([trained, filtered], coef=0.1)
    assert observed.advantages == [0.0, 0.0]
    sampled = [[a for a, mask in zip(s.advantages, s.loss_mask, strict=True) if mask] for r in (trained, filtered) for s in r.sequences[:1]]
    assert sampled == [pytest.approx([2.05, 1.8], abs=1e-15), [2.0, 2.0]]
    assert math.fsum(trained.sequences[0].advantages) == pytest.approx(3.85, abs=1e-15)


def test_the_algorithm_has_no_advantages() -> None:
    rollouts = [make_rollout(0, 1.0, lengths=(2, 1)), make_rollout(0, 0.0, lengths=(3,))]
    ALGORITHMS["distill"].advantage_fn(rollouts, AlgoSettings(name="distill"))
    assert all(sequence.advantages == [0.0] * len(sequence.token_ids) for rollout in rollouts for sequence in rollout.sequences)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"coef": 0.0}, "distill.coef=0.0"),
        ({"coef": math.nan}, "distill.coef=nan"),
        ({"final_coef": 0.1}, "distill.decay_steps=0"),
        ({"decay_steps": 3}, "distill.decay_steps=3"),
        ({"decay_steps": -1}, "distill.decay_steps=-1"),
        ({"final_coef": -0.5, "decay_steps": 2}, "distill.final_coef=-0.5"),
        ({"support": "some"}, "distill.support=some"),
        ({"apply_to": "prompt"}, "distill.apply_to=prompt"),
        ({"top_k": 0}, "distill.top_k=0"),
        ({"jsd_beta": 1.0}, "distill.jsd_beta=1.0"),
        ({"apply_to": "reward", "divergence": "jsd"}, "distill.divergence=jsd"),
        ({"apply_to": "reward", "support": "top_k"}, "distill.support=top_k"),
        ({"support": "sampled", "divergence": "jsd"}, "distill.divergence=jsd"),
        ({"clip": -0.1}, "distill.clip=-0.1: must be a finite, positive number, or 0 to clip nothing"),
        ({"clip": math.inf}, "distill.clip=inf"),
        ({"data_fraction": 1.0}, "distill.data_fraction=1.0: must be in"),
        ({"data_fraction": 0.5, "apply_to": "reward"}, "distill.data_fraction=0.5: distill.apply_to=reward needs tokens that"),
        ({"data_fraction": 0.5, "support": "sampled"}, "distill.data_fraction=0.5: distill.support=sampled needs tokens that"),
        ({"data_fraction": 0.5, "teachers": {"a": "b"}}, "distill.data_fraction=0.5: demonstrations have no data source"),
        ({"data_fraction": 0.5, "privileged_prompt": "x"}, "distill.data_fraction=0.5: demonstrations have no fields"),
        ({"support": "sampled", "clip": 0.1}, "distill.clip=0.1: clips the terms of a sum over outcomes"),
        ({"apply_to": "reward", "clip": 0.1}, "distill.clip=0.1: has no effect with distill.apply_to=reward"),
        ({"apply_to": "responses"}, "distill.apply_to=responses: needs a teacher that the rollout engine can load; set distill.merge"),
        ({"response_fraction": 0.5}, "distill.response_fraction=0.5: has no effect without distill.apply_to=responses"),
    ],
)
def test_bad_settings_are_one_line(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        DistillSettings(teacher="t", **given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({"teacher": "t"}, "distill.teacher=t: is a second teacher next to distill.server.urls; leave one of them out"),
        ({}, "distill.support=full: needs more than servers return; use top_k or sampled, or distill.apply_to=reward"),
    ],
)
def test_settings_that_a_server_cannot_serve(given: dict, refusal: str) -> None:
    server = TeacherServerSettings(urls=["http://teacher:8000"])
    for fits in ({"apply_to": "reward"}, {"support": "sampled"}):
        settings = DistillSettings(server=server, **fits)
        assert settings.has_teacher and not settings.has_divergence and settings.rewards_tokens == ("apply_to" in fits)
    assert DistillSettings(server=server, support="top_k").has_divergence
    with pytest.raises(ValueError, match=f"^{re.escape(refusal)}"):
        DistillSettings(server=server, **given)
    with pytest.raises(ValueError, match=r"^distill.data_fraction=0.5: servers score only tokens that the policy samples"):
        DistillSettings(server=server, support="top_k", data_fraction=0.5)
    with pytest.raises(ValueError, match=r"^distill.server.token_file=key: has no effect without distill.server.urls"):
        TeacherServerSettings(token_file="key")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"divergence": "jsd"}, "distill.divergence=jsd: has no effect with distill.apply_to=responses; leave it out"),
        ({"support": "top_k"}, "distill.support=top_k: has no effect with distill.apply_to=responses; leave it out"),
        ({"clip": 0.1}, "distill.clip=0.1: has no effect with distill.apply_to=responses; leave it out"),
        ({"response_fraction": 0.0}, "distill.response_fraction=0.0: must be in (0, 1]"),
        ({"response_fraction": 1.5}, "distill.response_fraction=1.5: must be in (0, 1]"),
        ({"privileged_prompt": "x"}, "distill.privileged_prompt=x: is not part of the contexts of distill.apply_to=responses"),
        ({"data_fraction": 0.5}, "distill.data_fraction=0.5: distill.apply_to=responses has no divergence"),
    ],
)
def test_settings_that_fit_no_responses(given: dict, message: str) -> None:
    """A teacher that generates responses scores no tokens."""
    settings = DistillSettings(merge=MergeSettings(method="ties"), apply_to="responses", response_fraction=0.5)
    assert settings.has_teacher and settings.generates_responses
    assert not (settings.is_local or settings.has_divergence or settings.rewards_tokens)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        DistillSettings(merge=MergeSettings(method="ties"), apply_to="responses", **given)


def test_teachers_by_data_source() -> None:
    """A source that is not listed has distill.teacher; an empty directory leaves a source out."""
    settings = DistillSettings(teachers={"a": "one", "b": "two", "c": "one", "d": ""})
    assert settings.has_teacher and settings.is_local and settings.has_divergence and settings.teacher_paths == ["one", "two"]
    assert [settings.teacher_index(source) for source in "abcdx"] == [0, 1, 0, -1, -1]
    assert [settings.teacher_key(path) for path in ("one", "two")] == ["distill.teachers.a", "distill.teachers.b"]
    settings = replace(settings, teacher="two")
    assert settings.teacher_paths == ["two", "one"] and settings.teacher_key("two") == "distill.teacher"
    assert [settings.teacher_index(source) for source in "abcdx"] == [1, 0, 1, -1, 0]
    assert {DistillSettings(teacher="t").teacher_index(source) for source in "ab"} == {0}
    server = TeacherServerSettings(urls_by_source={"a": ["http://one:8000"], "b": []})
    on_servers = DistillSettings(server=server, apply_to="reward")
    assert [on_servers.teacher_index(source) for source in "abc"] == [0, -1, -1]
    with pytest.raises(ValueError, match=r"^distill.teachers=.*: are further teachers next to distill.server.urls or distill.merge.method"):
        DistillSettings(teachers={"a": "one"}, merge=MergeSettings(method="ema"))
    with pytest.raises(ValueError, match=r"^distill.teachers=.*: names no directory of a teacher"):
        DistillSettings(teachers={"a": ""})


def test_a_merge_is_the_only_teacher() -> None:
    merge = MergeSettings(method="ema")
    settings = DistillSettings(merge=merge, divergence="jsd", support="top_k")
    assert settings.has_teacher and settings.is_local and settings.has_divergence
    for other in ({"teacher": "t"}, {"server": TeacherServerSettings(urls=["http://teacher:8000"]), "apply_to": "reward"}):
        with pytest.raises(
            ValueError, match=r"^distill.merge.method=ema: is a second teacher next to distill.teacher or distill.server.urls"
        ):
            DistillSettings(merge=merge, **other)
    with pytest.raises(ValueError, match=r"^distill.merge.method=ema: merges checkpoints of a policy that learns from rewards"):
        check_distill(settings, needs_teacher=ALGORITHMS["distill"].needs_teacher)
    check_distill(settings, needs_teacher=ALGORITHMS["grpo"].needs_teacher)


def test_steps_with_a_merged_teacher() -> None:
    """With two steps of critic warm-up and a checkpoint every three steps, the weights after the
    steps 4, 7 and 10 are merged, and all steps from 5 on have a teacher."""
    settings = Settings(
        model=ModelSettings(path="m"), run=RunSettings(dir="there"), critic=CriticSettings(warmup_steps=2),
        distill=DistillSettings(merge=MergeSettings(method="mean", every=3)),
    )  # fmt: skip
    assert [step for step in range(12) if merges_after(settings, step=step)] == [4, 7, 10]
    with_teacher = [step for step in range(12) if settings_at_step(History(), settings, step=step).distill.has_teacher]
    assert with_teacher == list(range(5, 12))
    assert settings_at_step(History(), settings, step=5) == settings
    without = replace(settings, distill=DistillSettings())
    assert not any(merges_after(without, step=step) for step in range(12))


def test_the_number_of_demonstrations_of_a_step() -> None:
    """With a fraction f of all samples, n rollouts are joined by f n / (1 - f)."""
    numbers = [DistillSettings(teacher="t", data_fraction=fraction).count_demonstrations(96) for fraction in (0.0, 0.25, 0.5, 0.9)]
    assert numbers == [0, 32, 96, 864]


def test_the_loss_of_demonstrations_by_hand() -> None:
    """The divergences 2 and 3.5 with the weights 1 and 2 and the coefficient 0.5 give 4.5; logprobs
    and entropies have no gradient, and no metric of rollouts is reported."""
    rows = make_loss_inputs([0.5, 1.75], [3.0, -1.0], weight=[1.0, 2.0], divergence=[2.0, 3.5], teacher_logprob=[-1.5, -2.5])
    rows = replace(rows, is_demonstration=True, ref_logprob_R=rows.old_logprob_R)
    assert rows.divergence_R is not None
    rows.divergence_R.requires_grad_()
    algo = AlgoSettings(kl_coef=0.1, entropy_coef=0.1, rollout_correction="token_tis")
    loss, metrics = make_policy_objective(algo, distill=make_distill_term(DistillSettings(teacher="t", coef=0.5), step=0))(rows)
    loss.backward()
    assert (loss.item(), rows.divergence_R.grad.tolist(), rows.logprob_R.grad) == (4.5, [0.5, 1.0], None)
    assert {name: value.item() for name, value in metrics.sums.items()} == {"distill/data_divergence": 5.5, "distill/data_tokens": 2.0}
    assert not metrics.maxima and not metrics.histograms
    updates = [{"policy/ratio": 1.0, "distill/data_divergence": 5.5 / 8, "distill/data_tokens": 2 / 8}]
    assert merge_update_metrics(updates) == {"policy/ratio": 1.0, "distill/data_divergence": 2.75}


def test_the_loss_of_responses_by_hand() -> None:
    """The logprobs -0.5 and -2 with the weights 1 and 2 and the coefficient 0.5 give 2.25; a
    rollout has the policy's loss alone."""
    distill = DistillSettings(merge=MergeSettings(method="mean"), apply_to="responses", coef=0.5)
    rows = make_loss_inputs([0.5, 0.0], [3.0, -1.0], weight=[1.0, 2.0])  # the old logprobs are -1 and -2
    loss, metrics = make_policy_objective(AlgoSettings(entropy_coef=0.1), distill=make_distill_term(distill, step=0))(
        replace(rows, is_demonstration=True)
    )
    loss.backward()
    assert (loss.item(), rows.logprob_R.grad.tolist()) == (2.25, [-0.5, -1.0])
    assert {name: value.item() for name, value in metrics.sums.items()} == {"distill/response_nll": 2.5, "distill/response_tokens": 2.0}
    updates = [{"policy/ratio": 1.0, "distill/response_nll": 2.5 / 8, "distill/response_tokens": 2 / 8}]
    assert merge_update_metrics(updates) == {"policy/ratio": 1.0, "distill/response_nll": 1.25}
    own, plain = (make_policy_objective(AlgoSettings(), distill=term)(rows)[0] for term in (make_distill_term(distill, step=0), None))
    assert own.item() == plain.item()


def test_settings_without_a_teacher_are_refused() -> None:
    with pytest.raises(ValueError, match=r"distill.coef=0.5: has no effect without distill.teacher"):
        DistillSettings(coef=0.5)
    with pytest.raises(ValueError, match=r"distill.teacher is empty, but this algorithm"):
        check_distill(DistillSettings(), needs_teacher=ALGORITHMS["distill"].needs_teacher)
    with pytest.raises(ValueError, match=r"distill.divergence=chi2: .*reverse_kl, forward_kl, jsd"):
        check_distill(DistillSettings(teacher="t", divergence="chi2"), needs_teacher=ALGORITHMS["grpo"].needs_teacher)
    assert set(DIVERGENCES) == {"reverse_kl", "forward_kl", "jsd"}
