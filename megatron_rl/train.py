"""GRPO on a vision-language model: roll out, credit, pack, update, sync. This file is the algorithm from top to bottom.

Synchronous and on-policy at the start of each step: the engine serves exactly the weights that are trained next. No replay, no critic,
no asynchrony. Every rank runs this function; rollouts and their credit are the same everywhere, the work is then dealt to ranks.
"""

from collections.abc import Sequence

from megatron_rl.algo.advantages import credit, credit_report, turn_credit
from megatron_rl.algo.losses import LossMetrics, grpo_loss
from megatron_rl.algo.selection import Selection, select
from megatron_rl.batch import cut_minibatches
from megatron_rl.config import DROPS, AlgoSettings, Settings
from megatron_rl.evaluate import evaluate
from megatron_rl.policy.policy import Loss, Policy
from megatron_rl.rollout.collect import Crew, choose_prompts, collect, episode_settings
from megatron_rl.run import Run, check_failures, rollout_metrics
from megatron_rl.run_states import Checkpoints
from megatron_rl.tasks.base import Task
from megatron_rl.types import Batch, Example, Rollout


def train(settings: Settings, *, task: Task, policy: Policy, crew: Crew, run: Run, checkpoints: Checkpoints) -> None:
    """The run's GRPO steps. Metrics and recorded rollouts are in the run folder afterwards, and the engine serves the final weights."""
    algo, engine, spans = settings.algo, crew.engine, run.spans
    examples = task.examples("train")
    with spans("sync"):
        checkpoints.restore()
        engine.load_weights(policy.hf_weights(), version=run.first_step)
        policy.sleep()
        engine.wake()

    for step in range(run.first_step, settings.run.steps):
        with run.rolling_out(engine):
            past = run.history.rounds
            rollouts, advantages, selection, rounds = roll_out(settings, task, examples, crew=crew, step=step, first_round=past)
        report = credit_report(rollouts, advantages)
        run.history.add(step, rollouts, rounds=rounds)

        with spans("update"):
            engine.sleep()
            policy.wake()
            credited = turn_credit(
                rollouts, advantages, keep=selection.keep,
                scheme=algo.credit, discount=algo.turn_discount, normalize_std=algo.normalize_std, std_eps=algo.std_eps,
            )  # fmt: skip
            minibatches = [pieces for pieces in cut_minibatches(rollouts, credited, algo) if pieces]
            minibatches = [policy.pack(pieces, max_tokens=algo.micro_batch_tokens, restore=crew.renderer.restore) for pieces in minibatches]
            if algo.minibatches * algo.epochs > 1:  # otherwise old = current, and the loss reads it from its own forward pass
                attach_logprobs(policy, minibatches, "current")
            if algo.kl_coef > 0:
                attach_logprobs(policy, minibatches, "reference")
            updates = [policy.update(batches, objective(algo)) for _ in range(algo.epochs) for batches in minibatches]

        with spans("checkpoint"):
            checkpoints.begin(step + 1)

        with spans("sync"):
            engine.load_weights(policy.hf_weights(), version=step + 1)
            policy.sleep()
            engine.wake()

        metrics = {**rollout_metrics(rollouts, report), **selection_metrics(selection, rounds), **merge_updates(updates)}
        if settings.run.eval_every and (step + 1) % settings.run.eval_every == 0 and step + 1 < settings.run.steps:
            with spans("evaluate"):
                metrics |= evaluate(task, settings, crew=crew)
        with spans("record"):
            run.record(step, rollouts, metrics)
        if step + 1 < settings.run.steps:  # the last one is judged by the final evaluation
            with spans("checkpoint"):
                checkpoints.step_done(step + 1, history=run.history, metrics=metrics)


def roll_out(
    settings: Settings, task: Task, examples: Sequence[Example], *, crew: Crew, step: int, first_round: int
) -> tuple[list[Rollout], list[float | None], Selection, int]:
    """Rounds of prompts until enough groups are left after the drops, or the rounds are used up; all that was rolled out, with its credit.

    Advantages are those within a group, so rounds do not change each other's; the last item is the number of rounds.
    """
    algo = settings.algo
    rollouts: list[Rollout] = []
    for number in range(algo.max_generations):
        dealt = choose_prompts(examples, algo.prompts_per_step, seed=settings.run.seed, step=first_round + number)
        how = episode_settings(settings, step=step)
        rollouts += collect(task, dealt, crew=crew, samples=algo.group_size, settings=how, first_group=len(dealt) * number)
        check_failures(rollouts, limit=settings.run.max_failed)
        advantages = credit(rollouts, normalize_std=algo.normalize_std, std_eps=algo.std_eps)
        selection = select(
            rollouts, advantages,
            drop=algo.drop, keep_ends=algo.keep_ends, num_groups=algo.prompts_per_step, rank_by_std=algo.rank_by_std,
        )  # fmt: skip
        if selection.num_groups >= algo.prompts_per_step:
            break
    return rollouts, advantages, selection, number + 1


def selection_metrics(selection: Selection, rounds: int) -> dict[str, float]:
    dropped = {f"rollout/dropped_{reason}": float(selection.dropped[reason]) for reason in (*DROPS, "surplus")}
    return {"rollout/rounds": float(rounds), "rollout/kept_groups": float(selection.num_groups), **dropped}


def objective(algo: AlgoSettings) -> Loss:
    """The GRPO loss of one micro-batch; the engine's logprobs are only compared with, never trained on."""

    def loss(logprob_R, entropy_R, batch: Batch, rows_R):  # noqa: ANN001, ANN202 (policy.Loss)
        current_R = logprob_R.detach()
        old_R = current_R if batch.old_logprob_T is None else batch.old_logprob_T[rows_R]
        value, metrics = grpo_loss(
            logprob_R,
            old_logprob_T=old_R,
            advantage_T=batch.advantage_T[rows_R],
            mask_T=batch.mask_T[rows_R],
            weight_T=batch.weight_T[rows_R],
            clip_low=algo.clip_low,
            clip_high=algo.clip_high,
            dual_clip=algo.dual_clip,
            reference_logprob_T=None if batch.reference_logprob_T is None else batch.reference_logprob_T[rows_R],
            kl_coef=algo.kl_coef,
            kl_estimator=algo.kl_estimator,
            entropy_T=entropy_R,
            entropy_coef=algo.entropy_coef,
        )
        return value, with_engine_gap(metrics, old_R - batch.engine_logprob_T[rows_R])

    return loss


def with_engine_gap(metrics: LossMetrics, gap_R) -> LossMetrics:  # noqa: ANN001
    """Add |trainer logprob - engine logprob|: what one weight sync and two implementations of one model differ by."""
    metrics.sums["engine/logprob_gap"] = gap_R.abs().sum()
    metrics.maxima["engine/logprob_gap_max"] = gap_R.abs().max() if gap_R.numel() else gap_R.new_zeros(())
    return metrics


def attach_logprobs(policy: Policy, minibatches: list[list[Batch]], weights: str) -> None:
    """Compute the old ("current") or reference logprobs of every batch before the first update changes the weights."""
    for batches in minibatches:
        for batch, logprob_T in zip(batches, policy.logprobs(batches, weights=weights), strict=True):
            if weights == "current":
                batch.old_logprob_T = logprob_T
            else:
                batch.reference_logprob_T = logprob_T


def merge_updates(updates: list[dict[str, float]]) -> dict[str, float]:
    """One step's metrics from its updates: means, and maxima where the name says so; the first ratio stands apart, it must be 1.

    None where every rollout of the step was dropped.
    """
    if not updates:
        return {}
    names = updates[0].keys()
    values = {name: [update[name] for update in updates] for name in names}
    merged = {name: max(each) if name.endswith("_max") else sum(each) / len(each) for name, each in values.items()}
    first = updates[0]
    return {**merged, "policy/first_ratio": first["policy/ratio"], "engine/logprob_gap_max": first["engine/logprob_gap_max"]}
