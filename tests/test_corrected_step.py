"""A training step with each rollout correction, from rollouts on several ranks, micro-batches and
shared prompts to loss and gradient. Oracle: plain loops over sequences. The policy's logprobs are
scripted per token.
"""

import math
from dataclasses import replace
from statistics import fmean

import pytest
import torch

from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.algo.rollout_correction import CORRECTIONS
from megatron_rl.batching.packing import make_loss_inputs
from megatron_rl.config import AlgoSettings, BatchSettings, Settings
from megatron_rl.types import MicroBatch, Rollout
from tests.support.rollout_correction_oracle import textbook_weights
from tests.test_training_loop import COEF, SAYS, by_token, credited_on, sampled, step

EVERY = (*CORRECTIONS, "token_tis+geo_mask", "bypass+geo_mask+opsm")
BOUNDS = {"sequence_mask_high": 1.2, "geo_mask_low": 0.9, "geo_mask_high": 1.2, "k3_mask_high": 0.03, "opsm_delta": 0.05}
BOUNDS |= {"token_mask_low": 0.8, "token_mask_high": 1.25, "is_weight_cap": 1.15}


def engine(token: int) -> float:
    """Return a sampled token's logprob under the engine, which differs from the trainer's by at
    most 0.3.
    """
    return SAYS["current"](token) + 0.3 * math.sin(token)


def now(token: int) -> float:
    """Return a token's logprob under the trainer in a later update of the step."""
    return SAYS["current"](token) + 0.25 * math.cos(3 * token)


def off_policy() -> list[Rollout]:
    rollouts = step()
    for context in (context for rollout in rollouts for context in rollout.sequences):
        context.rollout_logprobs = [engine(t) * mask for t, mask in zip(context.token_ids, context.loss_mask, strict=True)]
    return rollouts


def expected(rollouts: list[Rollout], algo: AlgoSettings) -> tuple[float, dict[int, float]]:
    """Return PPO's clipped loss, averaged over the sampled tokens that are trained on, and its
    gradient per token, computed sequence by sequence.
    """
    num = sum(rollout.num_sampled for rollout in rollouts if rollout.is_trained_on)
    bypass, total, gradient = "bypass" in algo.rollout_correction, 0.0, {}
    for context in (context for rollout in rollouts if rollout.is_trained_on for context in rollout.sequences):
        places = [place for place, mask in enumerate(context.loss_mask) if mask]
        tokens, advantages = ([column[place] for place in places] for column in (context.token_ids, context.advantages))
        weights = textbook_weights(
            algo,
            log_r=[(now(t) if bypass else SAYS["current"](t)) - engine(t) for t in tokens],
            drift=[engine(t) - now(t) for t in tokens],
            advantage=advantages,
            sequence=[0] * len(tokens),
        )
        for t, a, weight in zip(tokens, advantages, weights, strict=True):
            ratio = math.exp(now(t) - (engine(t) if bypass else SAYS["current"](t)))
            bounded = min(max(ratio, 1 - algo.clip_ratio_low), 1 + algo.clip_ratio_high)
            total -= weight * min(ratio * a, bounded * a) / num
            gradient[t] = -weight * ratio * a / num if ratio * a <= bounded * a else 0.0
    return total, gradient


def update(batches: list[MicroBatch], algo: AlgoSettings) -> tuple[float, dict[int, float], float, int, int]:
    """Return loss, gradient by token, number of masked tokens, number of tokens and denominator,
    summed over these micro-batches.
    """
    total, gradient, masked, num = 0.0, {}, 0.0, 0
    for batch in batches:
        rows_R = batch.mask_T.nonzero().flatten()
        logprob_R = torch.tensor([now(token) for token in batch.target_T[rows_R].tolist()], requires_grad=True)
        loss, metrics = make_policy_objective(algo)(make_loss_inputs(batch, rows_R, logprob_R, torch.ones(len(rows_R))))
        total += loss.item()
        grads_T = torch.zeros(batch.num_tokens).index_copy(0, rows_R, torch.autograd.grad(loss, logprob_R)[0])
        gradient |= by_token(batch, grads_T)
        masked += metrics.sums["rollout_mismatch/masked_fraction"].item() if algo.rollout_correction != "none" else 0.0
        num += len(rows_R)
    return total, gradient, masked, num, sum(batch.denominator for batch in batches)


@pytest.mark.known_failure("micro-batch-means")
@pytest.mark.parametrize("correction", EVERY)
@pytest.mark.parametrize(("ranks", "max_tokens"), [(1, 1000), (1, 24), (2, 24), (2, 1000)])
@pytest.mark.parametrize("share", [True, False])
def test_a_step_does_not_depend_on_how_it_was_cut(
    correction: str, ranks: int, max_tokens: int, share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss and gradient do not depend on the number of ranks, the micro-batch size or shared
    prompts. With two epochs, the old logprobs are computed; the second epoch is checked. Masked
    tokens stay in the denominator.
    """
    monkeypatch.setattr("tests.test_training_loop.step", off_policy)
    algo = AlgoSettings(name="rloo", rollout_correction=correction, **BOUNDS)
    settings = Settings(algo=algo, batch=BatchSettings(prompts_per_step=4, micro_batch_tokens=max_tokens, epochs=2))
    done = credited_on(ranks, settings, monkeypatch, share=share)
    assert all(policy.asked == ([] if "bypass" in correction else ["current"]) for _, policy, _ in done)
    batches = [batch for _, _, (minibatch,) in done for batch in minibatch]
    assert (len(batches) > ranks) == (max_tokens == 24)
    total, gradient, masked, num, denominator = update(batches, algo)
    assert denominator == num == sum(rollout.num_sampled for rollout in step() if rollout.is_trained_on)
    wanted, by = expected(done[0][0], algo)
    assert total / denominator == pytest.approx(wanted, abs=1e-6)
    assert {token: value / denominator for token, value in gradient.items()} == pytest.approx(by, abs=1e-6)
    masks = any(name.endswith("_mask") or name == "opsm" for name in correction.split("+"))
    assert (0 < masked < num) == masks


def test_with_bypass_the_kl_in_the_reward_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """kl_coef * (engine logprob - reference logprob) is subtracted from each token's reward, so
    only the reference model's logprobs are computed.
    """
    monkeypatch.setattr("tests.test_training_loop.step", off_policy)
    algo = AlgoSettings(name="rloo", kl_coef=COEF, use_kl_in_reward=True, rollout_correction="bypass")
    ((rollouts, policy, minibatches),) = credited_on(1, Settings(algo=algo, batch=BatchSettings(prompts_per_step=4)), monkeypatch)
    assert policy.asked == ["reference"]

    def worth(rollout: Rollout) -> float:
        cost = sum(COEF * (engine(token) - SAYS["reference"](token)) for token in sampled(rollout))
        return rollout.reward - (0.0 if rollout.filter_reason else cost)

    for rollout in (each for each in rollouts if each.is_trained_on):
        others = [worth(each) for each in rollouts if each.group == rollout.group and each is not rollout and each.is_scored]
        credits = [each for context in rollout.sequences for each, mask in zip(context.advantages, context.loss_mask, strict=True) if mask]
        assert credits == pytest.approx([worth(rollout) - fmean(others)] * rollout.num_sampled, abs=1e-5)
    assert all(batch.old_logprob_T is None for batches in minibatches for batch in batches)


def test_dropping_a_sequence_takes_nothing_off_the_denominator(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all sequences are masked, loss and gradient are 0, and the denominator is the same as
    without masking.
    """
    monkeypatch.setattr("tests.test_training_loop.step", off_policy)
    algo = AlgoSettings(name="rloo", rollout_correction="geo_mask", geo_mask_low=1.0, geo_mask_high=1.0)
    settings = Settings(algo=algo, batch=BatchSettings(prompts_per_step=4))
    plain = replace(settings, algo=replace(algo, rollout_correction="none"))
    (((_, _, (masked,)),), ((_, _, (whole,)),)) = (credited_on(1, each, monkeypatch) for each in (settings, plain))
    total, gradient, num_masked, num, denominator = update(masked, algo)
    assert (total, set(gradient.values()), num_masked) == (0.0, {0.0}, num)
    assert denominator == update(whole, plain.algo)[4] == num
