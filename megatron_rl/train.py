"""Reinforcement learning of a vision-language policy: roll out, select, credit, update, serve. This file is the loop from top to bottom.

Synchronous and on-policy at the start of each step: the engine serves exactly the weights that are trained next. What tells algorithms
apart is in algo/. Every rank runs this function; rollouts and their credit are the same everywhere, the work is then dealt to ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from megatron_rl.algo.algorithms import ALGORITHMS, Algorithm, needs_old, needs_reference
from megatron_rl.algo.credit import spreads
from megatron_rl.algo.objective import objective
from megatron_rl.algo.select import kept_groups, select
from megatron_rl.batch import read_back, take_advantages
from megatron_rl.config import Settings
from megatron_rl.evaluate import evaluate
from megatron_rl.minibatches import cut_minibatches
from megatron_rl.policy.policy import Policy
from megatron_rl.rollout.fleet import Fleet
from megatron_rl.run import Run, check_failures, require_finite
from megatron_rl.run_states import Checkpoints
from megatron_rl.step_metrics import merge_updates, rollout_metrics
from megatron_rl.stop import Stop
from megatron_rl.types import Batch, Context, Rollout
from megatron_rl.world import gather


def train(
    settings: Settings, *,
    policy: Policy, fleet: Fleet, run: Run, checkpoints: Checkpoints, stop: Stop, algorithms: Mapping[str, Algorithm] = ALGORITHMS,
) -> None:  # fmt: skip
    """The run's steps. Metrics and recorded rollouts are in the run folder afterwards, and the engine serves the final weights.

    Stopped, on every rank: run.num_done says of how many steps the weights are.
    """
    spans, algorithm, loss = run.spans, algorithms[settings.algo.name], objective(settings.algo, algorithms)
    with spans("sync"):
        with fleet.away():
            checkpoints.restore()
        fleet.rounds = run.history.rounds
        fleet.serve(policy.hf_weights(), version=run.first_step)
    if run.history.owed:  # stopped in that evaluation
        close(run.first_step - 1, settings, fleet=fleet, run=run, checkpoints=checkpoints)
        checkpoints.paid(history=run.history, metrics=run.metrics)
    stop.check()

    for step in range(run.first_step, settings.run.steps):
        with run.rolling_out(fleet.busy_s):
            rollouts = fleet.take(step, enough=partial(played_enough, settings=settings, algorithm=algorithm, run=run, step=step))
        rounds = fleet.rounds - run.history.rounds
        run.history.add(step, rollouts, rounds=rounds)

        with spans("update"), fleet.away():
            with run.keeping_rollouts(rollouts, step=step):
                minibatches = credited(rollouts, settings, policy, algorithm=algorithm, restore=fleet.renderer.restore)
            updates = []
            for batches in minibatches * settings.batch.epochs:
                with run.keeping(batches, step=step):
                    updates.append(policy.update(batches, loss, step=step))

        with spans("checkpoint"):
            checkpoints.begin(step + 1)

        with spans("sync"):
            fleet.serve(policy.hf_weights(), version=step + 1)

        with spans("record"):
            run.trained(step, rollouts, {**rollout_metrics(rollouts, rounds=rounds), **merge_updates(updates)})
        close(step, settings, fleet=fleet, run=run, checkpoints=checkpoints)
        stop.check()


def close(step: int, settings: Settings, *, fleet: Fleet, run: Run, checkpoints: Checkpoints) -> None:
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


def credited(
    rollouts: list[Rollout], settings: Settings, policy: Policy, *, algorithm: Algorithm, restore: Callable[[Context], None]
) -> list[list[Batch]]:
    """Credit the rollouts and pack what is trained on: the micro-batches of each update, with what the loss reads of networks.

    Where credit itself reads what networks say of the tokens, they are packed and read first, and their advantages follow them.
    """
    algo, batch = settings.algo, settings.batch
    reads = algorithm.reads(algo)
    if not reads:
        algorithm.credit(rollouts, algo)
    with_idle = bool(reads) or algo.kl_coef > 0 or algo.entropy_coef > 0  # else nothing but the advantage moves the policy
    cut_up = cut_minibatches(rollouts, batch, with_idle=with_idle)
    minibatches = [policy.pack(minibatch, max_tokens=batch.micro_batch_tokens, restore=restore) for minibatch in cut_up]
    every = [each for batches in minibatches for each in batches]
    if needs_old(algo, num_updates=batch.minibatches * batch.epochs):
        for each, logprob_T in zip(every, said(policy, minibatches, weights="current"), strict=True):
            each.old_logprob_T = logprob_T
    if needs_reference(algo):
        for each, logprob_T in zip(every, said(policy, minibatches, weights="reference"), strict=True):
            each.reference_logprob_T = logprob_T
    if reads:
        attach(rollouts, every, [each.old_logprob_T for each in every], column="old_logprobs")
        attach(rollouts, every, [each.reference_logprob_T for each in every], column="reference_logprobs")
        algorithm.credit(rollouts, algo)
        for each in every:
            take_advantages(rollouts, each)
    return minibatches


def said(policy: Policy, minibatches: list[list[Batch]], *, weights: str) -> list[torch.Tensor]:
    """Logprobs of every micro-batch, before the first update changes the weights."""
    return [logprob_T for batches in minibatches for logprob_T in policy.logprobs(batches, weights=weights)]


def attach(rollouts: Sequence[Rollout], batches: Sequence[Batch], numbers: Sequence[torch.Tensor], *, column: str) -> None:
    """Write what a network said of this rank's tokens, and of all others', to the contexts they are of."""
    for columns in gather(read_back(rollouts, batches, numbers)):
        for (rollout, context), values in columns.items():
            rollouts[rollout].contexts[context].attach(column, values)
