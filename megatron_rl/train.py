"""GRPO on a vision-language model: roll out, credit, pack, update, sync. This file is the algorithm from top to bottom.

Synchronous and on-policy at the start of each step: the engine serves exactly the weights that are trained next. No replay, no critic,
no asynchrony. Every rank runs this function; rollouts and their credit are the same everywhere, the work is then dealt to ranks.
"""

from megatron_rl.algo.advantages import credit, credit_report
from megatron_rl.algo.losses import LossMetrics, grpo_loss
from megatron_rl.batch import cut_minibatches
from megatron_rl.checkpoints import Checkpoints
from megatron_rl.config import AlgoSettings, Settings
from megatron_rl.evaluate import evaluate
from megatron_rl.policy.policy import Loss, Policy
from megatron_rl.rollout.collect import Crew, collect, deal, episode_settings
from megatron_rl.run import Run, check_failures, rollout_metrics
from megatron_rl.tasks.base import Task
from megatron_rl.types import Batch


def train(settings: Settings, *, task: Task, policy: Policy, crew: Crew, run: Run, checkpoints: Checkpoints) -> None:
    """The run's GRPO steps. Metrics and recorded rollouts are in the run folder afterwards, and the engine serves the final weights."""
    algo, engine, spans = settings.algo, crew.engine, run.spans
    examples = task.examples("train")
    with spans("sync"):
        checkpoints.restore()
        engine.load_weights(policy.hf_weights(), version=run.first_step)
        policy.sleep()

    for step in range(run.first_step, settings.run.steps):
        dealt = deal(examples, algo.prompts_per_step, seed=settings.run.seed, step=step)
        with run.rolling_out(engine):
            rollouts = collect(task, dealt, crew=crew, samples=algo.group_size, settings=episode_settings(settings, step=step))
        check_failures(rollouts, limit=settings.run.max_failed)

        advantages = credit(rollouts, normalize_std=algo.normalize_std, std_eps=algo.std_eps)
        report = credit_report(rollouts, advantages)

        with spans("update"):
            engine.sleep()
            policy.wake()
            minibatches = cut_minibatches(rollouts, advantages, algo)
            minibatches = [policy.pack(pieces, max_tokens=algo.micro_batch_tokens) for pieces in minibatches]
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

        metrics = {**rollout_metrics(rollouts, report), **merge_updates(updates)}
        if settings.run.eval_every and (step + 1) % settings.run.eval_every == 0 and step + 1 < settings.run.steps:
            with spans("evaluate"):
                metrics |= evaluate(task, settings, crew=crew)
        with spans("record"):
            run.record(step, rollouts, metrics)
        if step + 1 < settings.run.steps:  # the last one is judged by the final evaluation
            with spans("checkpoint"):
                checkpoints.step_done(step + 1, returns=run.returns, metrics=metrics)


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
    """One step's metrics from its updates: means, and maxima where the name says so; the first ratio stands apart, it must be 1."""
    names = updates[0].keys()
    merged = {name: max(u[name] for u in updates) if name.endswith("_max") else sum(u[name] for u in updates) / len(updates) for name in names}
    return {**merged, "policy/first_ratio": updates[0]["policy/ratio"], "engine/logprob_gap_max": updates[0]["engine/logprob_gap_max"]}
