"""Reinforcement learning of a vision-language policy: roll out, select, credit, update, serve. This file is the loop from top to bottom.

The engine serves exactly the weights that are trained next: on-policy at the start of each step, unless run.max_staleness lets episodes go
on over an update. What tells algorithms apart is in algo/. Every rank runs this function; rollouts and their credit are the same
everywhere, the work is then dealt to ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from megatron_rl.algo.advantages import spreads
from megatron_rl.algo.algorithms import ALGORITHMS, Algorithm, needs_old, needs_reference
from megatron_rl.algo.filtering import kept_groups, select
from megatron_rl.algo.gae import expected_and_earned
from megatron_rl.algo.kl import adapted
from megatron_rl.algo.objective import objective
from megatron_rl.algo.rollout_correction import bypasses
from megatron_rl.algo.thoughts import weigh_thoughts
from megatron_rl.algo.value import head_alone, joint, value_objective
from megatron_rl.batching.minibatches import Shares, cut_minibatches
from megatron_rl.batching.packing import take
from megatron_rl.batching.token_stats import Notes, attach, notes_of
from megatron_rl.config import AlgoSettings, Settings
from megatron_rl.distributed.image_exchange import Gallery
from megatron_rl.evaluation.in_run import evaluate
from megatron_rl.observe.step_metrics import merge_updates, rollout_metrics, staleness_metrics, value_metrics
from megatron_rl.policy.critic import Critic
from megatron_rl.policy.policy import Policy
from megatron_rl.rollout.manager import Fleet
from megatron_rl.rollout.replay import Replay
from megatron_rl.rollout.weight_publisher import Audience
from megatron_rl.run.checkpoints import Checkpoints
from megatron_rl.run.failure_checks import MismatchCheck, check_failures, require_finite
from megatron_rl.run.record import History, Run
from megatron_rl.run.shutdown import Stop
from megatron_rl.types import Batch, Image, Rollout


def train(
    settings: Settings, *,
    policy: Policy, critic: Critic | None = None, fleet: Fleet | Replay, gallery: Gallery, run: Run, checkpoints: Checkpoints, stop: Stop,
    algorithms: Mapping[str, Algorithm] = ALGORITHMS, audience: Audience | None = None,
) -> None:  # fmt: skip
    """The run's steps. Metrics and recorded rollouts are in the run folder afterwards, and the engine serves the final weights.

    Stopped, on every rank: run.num_done says of how many steps the weights are.
    """
    spans, algorithm, check = run.spans, algorithms[settings.algo.name], MismatchCheck(settings)
    begin(settings, policy=policy, fleet=fleet, run=run, checkpoints=checkpoints, audience=audience)
    stop.check()

    for step in range(run.first_step, settings.run.steps):
        with run.rolling_out(fleet.busy_s):
            rollouts = fleet.take(step, enough=partial(played_enough, settings=settings, algorithm=algorithm, run=run, step=step))
        rounds = fleet.admission.rounds - run.history.rounds
        run.history.add(step, rollouts, rounds=rounds, dealt=fleet.admission.not_trained_on)
        now = as_of(run.history, settings)

        with spans("update"), fleet.away():
            show = partial(gallery.show, rollouts=rollouts)
            minibatches = credited(rollouts, now, policy, critic, algorithm=algorithm, show=show, step=step)
            if algorithm.needs_values and critic is None and step == settings.critic.warmup_steps > 0:
                policy.restart_optimizer()  # AdamW would count the steps of the head's warm-up as the trunk's
            notes = notes_of(settings)
            update = partial(kept, run, policy, updates_of(now, policy, critic, algorithms, notes, check), step)
            with run.recording_mismatch(rollouts, step=step):
                updates = [update(batches) for batches in minibatches * settings.batch.epochs]
            if notes is not None:
                notes.attach(rollouts)
            gallery.forget()
            told = audience.serve(policy.hf_weights, step=step + 1) if audience else {}

        with spans("checkpoint"):
            checkpoints.begin(step + 1, is_last=step + 1 == settings.run.steps)

        with spans("sync"):
            fleet.serve(policy.hf_weights(), version=step + 1)

        with spans("record"):
            metrics = rollout_metrics(rollouts, rounds=rounds) | merge_updates(updates) | expectations(rollouts, now.algo, algorithm)
            metrics |= fleet.figures() | told
            if settings.run.max_staleness > 0:
                metrics |= staleness_metrics(rollouts, step=step, num_stale=fleet.num_stale)
            if now.algo.kl_target > 0 and step >= settings.critic.warmup_steps:  # before, nothing pulls at the policy
                metrics |= adapt_kl(run.history, rollouts, metrics, now.algo)
            run.trained(step, rollouts, metrics)
        del rollouts, minibatches, show, notes, update  # the next step's pictures have their memory
        close(step, settings, fleet=fleet, run=run, checkpoints=checkpoints)
        stop.check()


def begin(
    settings: Settings, *, policy: Policy, fleet: Fleet | Replay, run: Run, checkpoints: Checkpoints, audience: Audience | None
) -> None:  # fmt: skip
    """Go on where the last checkpoint stands: its weights in trainer, engine and audience, its rounds, and the evaluation that it may still
    owe."""
    with run.spans("sync"):
        with fleet.away():
            checkpoints.restore()
            if audience is not None:
                audience.begin(policy.hf_weights, step=run.first_step)
        fleet.admission.rounds, fleet.admission.owed = run.history.rounds, run.history.dealt
        fleet.serve(policy.hf_weights(), version=run.first_step)
    if run.history.owed:
        close(run.first_step - 1, settings, fleet=fleet, run=run, checkpoints=checkpoints)
        checkpoints.paid(history=run.history, metrics=run.metrics)


def close(step: int, settings: Settings, *, fleet: Fleet | Replay, run: Run, checkpoints: Checkpoints) -> None:
    """What follows a step's updates: the evaluation that may be due, its metrics, and what its checkpoint learns of it."""
    metrics, is_last = run.history.owed, step + 1 == settings.run.steps
    if settings.run.eval_every and (step + 1) % settings.run.eval_every == 0 and not is_last:
        with run.spans("evaluate"):
            metrics = metrics | evaluate(fleet.task, settings, fleet=fleet)
    with run.spans("record"):
        run.record(step, metrics)
    if not is_last:  # the last one is judged by the final evaluation
        with run.spans("checkpoint"):
            checkpoints.step_done(step + 1, history=run.history, metrics=metrics)


def as_of(history: History, settings: Settings) -> Settings:
    """The settings with what the steps so far have made of them: algo.kl_coef, where algo.kl_target moves it."""
    return settings if history.kl_coef is None else replace(settings, algo=replace(settings.algo, kl_coef=history.kl_coef))


def expectations(rollouts: list[Rollout], algo: AlgoSettings, algorithm: Algorithm) -> dict[str, float]:
    """How well values expected what was earned, where there are any."""
    return value_metrics(*expected_and_earned(rollouts, algo)) if algorithm.needs_values else {}


def adapt_kl(history: History, rollouts: list[Rollout], metrics: Mapping[str, float], algo: AlgoSettings) -> dict[str, float]:
    """Move the KL's weight for the next step, and tell this one's. It stays where every rollout was dropped: nothing was measured."""
    history.kl_coef, kl = algo.kl_coef, metrics.get("policy/kl_reference")
    if kl is not None:
        num = sum(rollout.is_trained_on for rollout in rollouts)
        history.kl_coef = adapted(algo.kl_coef, kl, target=algo.kl_target, num_episodes=num, horizon=algo.kl_horizon)
    return {"policy/kl_coef": algo.kl_coef}


def played_enough(rollouts: list[Rollout], *, settings: Settings, algorithm: Algorithm, run: Run, step: int) -> bool:
    """Whether a step needs no further round. RunFailed: too many rollouts failed, or one has a number that is not finite."""
    check_failures(rollouts, limit=settings.run.max_failed)
    with run.keeping_rollouts(rollouts, step=step):
        require_finite(rollouts)
        return is_enough(rollouts, settings, algorithm)


def is_enough(rollouts: list[Rollout], settings: Settings, algorithm: Algorithm) -> bool:
    """Drop what is not trained on, and say whether as many groups are left as a step wants."""
    spread = spreads(rollouts, settings.algo)
    num_groups = settings.batch.prompts_per_step
    select(rollouts, settings.select, num_groups=num_groups, spread=spread, needs_peers=algorithm.needs_peers)
    return len(kept_groups(rollouts)) >= num_groups


def updates_of(
    settings: Settings, policy: Policy, critic: Critic | None, algorithms: Mapping[str, Algorithm], notes: Notes | None = None,
    check: MismatchCheck | None = None,
) -> Callable[[list[Batch], int], dict[str, float]]:  # fmt: skip
    """(batches, step) -> metrics of one optimizer update of whatever learns in that step: the policy, and a critic where there is one."""
    see = notes.see if notes is not None else None
    of_policy = objective(settings.algo, algorithms)
    of_values = value_objective(settings.critic, over=settings.algo.gae_over)
    has_values = algorithms[settings.algo.name].needs_values
    together = joint(of_policy, of_values, settings.critic.coef) if has_values and critic is None else of_policy

    def update(batches: list[Batch], step: int) -> dict[str, float]:
        warms_up = has_values and step < settings.critic.warmup_steps
        if critic is None:
            loss = head_alone(of_policy, of_values) if warms_up else together
            return policy.update(batches, loss, step=step, head_alone=warms_up, see=see, check=check)
        metrics = {} if warms_up else policy.update(batches, of_policy, step=step, see=see, check=check)
        return metrics | critic.update(batches, of_values, step=step)

    return update


def kept(
    run: Run, policy: Policy, update: Callable[[list[Batch], int], dict[str, float]], step: int, batches: list[Batch]
) -> dict[str, float]:
    """One update. What it trained on stays in the run folder where a number is not finite."""
    with run.keeping(batches, step=step, complete=policy.complete):
        return update(batches, step)


SAID = {"old_logprobs": "old_logprob_T", "reference_logprobs": "reference_logprob_T", "values": "old_value_T"}
"""Columns of Context that networks fill, and where the same numbers lie in a batch."""


def credited(
    rollouts: list[Rollout], settings: Settings, policy: Policy, critic: Critic | None = None,
    *, algorithm: Algorithm, show: Callable[[Mapping[int, Sequence[Image]]], None], step: int,
) -> list[list[Batch]]:  # fmt: skip
    """Credit the rollouts and pack what is trained on: the micro-batches of each update, with what the loss reads of networks.

    `show` brings pictures to the ranks that encode them; `step` is the version of the weights that the first update changes.

    Where credit itself reads what networks say of the tokens, they are packed and read first, and their advantages follow them.
    """
    algo, batch = settings.algo, settings.batch
    reads = algorithm.reads(algo)
    if not reads:
        algorithm.credit(rollouts, algo)
    with_idle = bool(reads) or algo.kl_coef > 0 or algo.entropy_coef > 0  # else nothing but the advantage moves the policy
    cut_up = cut_minibatches(rollouts, batch, with_idle=with_idle)
    dealt = [policy.deal(minibatch, max_tokens=batch.micro_batch_tokens) for minibatch in cut_up]
    show(pictures(dealt, policy))
    minibatches = [policy.packed(each) for each in dealt]
    every = [each for batches in minibatches for each in batches]
    if settings.run.max_staleness > 0:
        for each in every:
            each.current_T = (take(rollouts, each, "versions") == step) & each.mask_T
    if algo.thought_coef != 1:
        weigh_thoughts(rollouts, algo.thought_coef)
        for each in every:
            each.coefficient_T = take(rollouts, each, "coefficients")
    read(minibatches, settings, policy, critic, has_values=algorithm.needs_values)
    if reads:
        said = SAID | ({"old_logprobs": "engine_logprob_T"} if bypasses(algo) else {})
        for column in reads:
            attach(rollouts, every, [getattr(each, said[column]) for each in every], column=column)
        algorithm.credit(rollouts, algo)
        for each in every:
            each.advantage_T = take(rollouts, each, "advantages")
    if algorithm.needs_values:
        for each in every:
            each.return_T = take(rollouts, each, "returns")
        (critic or policy).see(expected_and_earned(rollouts, algo)[1])
    return minibatches


def pictures(updates: Sequence[Shares], policy: Policy) -> dict[int, list[Image]]:
    """By rank, the images that it encodes in any of these updates."""
    needed: dict[int, list[Image]] = {}
    for dealt in updates:
        for rank, images in policy.pictures(dealt).items():
            needed.setdefault(rank, []).extend(images)
    return needed


def read(minibatches: list[list[Batch]], settings: Settings, policy: Policy, critic: Critic | None, *, has_values: bool) -> None:
    """Give every micro-batch what networks say of it, before the first update changes the weights: each set of weights in one pass."""
    algo, batch = settings.algo, settings.batch
    has_old, shares_trunk = needs_old(algo, num_updates=batch.minibatches * batch.epochs), has_values and critic is None
    if has_old and shares_trunk:
        fill(minibatches, policy.logprobs_and_values, "old_logprob_T", "old_value_T")
    elif has_old:
        fill(minibatches, policy.logprobs, "old_logprob_T")
    elif shares_trunk:
        fill(minibatches, policy.values, "old_value_T")
    if critic is not None:
        fill(minibatches, critic.values, "old_value_T")
    if needs_reference(algo):
        fill(minibatches, partial(policy.logprobs, weights="reference"), "reference_logprob_T")


def fill(minibatches: list[list[Batch]], say: Callable[[list[Batch]], list[torch.Tensor]], *names: str) -> None:
    """Write the column of this name, or the columns of these, that `say` gives of each micro-batch."""
    for batches in minibatches:
        for batch, numbers in zip(batches, say(batches), strict=True):
            for name, number_T in zip(names, numbers.view(len(names), -1), strict=True):
                setattr(batch, name, number_T)
