"""The RL training loop: generate rollouts, filter, compute advantages, update, sync weights.

Weights are synced to the rollout engine after every step, so new rollouts are on-policy. With
run.max_staleness > 0, episodes may continue across weight updates. Code that depends on the
algorithm is in algo/. Every rank runs `train`: all ranks have the same rollouts and advantages, and
the model computation is sharded.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from megatron_rl.algo.advantages import group_std
from megatron_rl.algo.algorithms import ALGORITHMS, Algorithm
from megatron_rl.algo.distill import has_merge, make_distill_term, merges_after
from megatron_rl.algo.filtering import apply_filters, used_groups
from megatron_rl.algo.gae import values_and_returns
from megatron_rl.algo.kl import adaptive_kl_coef
from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.algo.value import make_value_objective, shared_value_loss, warmup_value_loss
from megatron_rl.batching.token_stats import TokenStats, build_token_stats
from megatron_rl.config import AlgoSettings, DistillSettings, Settings
from megatron_rl.distributed.image_exchange import ImageExchange
from megatron_rl.evaluation.in_run import evaluate_in_run
from megatron_rl.observe.step_metrics import merge_update_metrics, rollout_metrics, staleness_metrics, value_metrics
from megatron_rl.policy.critic import Critic
from megatron_rl.policy.policy import Policy
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.replay import RolloutReplay
from megatron_rl.rollout.teacher_responses import generate_responses, sequences_with_loss
from megatron_rl.rollout.weight_publisher import WeightPublisher
from megatron_rl.run.checkpoints import Checkpoints
from megatron_rl.run.failure_checks import MismatchCheck, check_failures, require_finite
from megatron_rl.run.history import History
from megatron_rl.run.record import Run
from megatron_rl.run.shutdown import StopSignal
from megatron_rl.training_batch import prepare_training_batch
from megatron_rl.types import MicroBatch, Rollout, TokenSequence


def train(
    run: Run, *,
    policy: Policy, critic: Critic | None = None, rollout_manager: RolloutManager | RolloutReplay, image_exchange: ImageExchange,
    checkpoints: Checkpoints, stop_signal: StopSignal, algorithms: Mapping[str, Algorithm] = ALGORITHMS,
    weight_publisher: WeightPublisher | None = None,
) -> None:  # fmt: skip
    """Run all remaining training steps, starting from the newest checkpoint.

    On return, the run directory contains metrics and recorded rollouts, and the rollout engine
    serves the final weights.

    Raises:
        GracefulStop: A stop of the run was requested; raised on every rank. run.num_done is then
            the number of completed training steps, and the policy has the weights after these
            steps.
    """
    settings = run.settings
    timer, algorithm, check = run.step_timer, algorithms[settings.algo.name], MismatchCheck(settings)
    restore_and_sync(
        settings, policy=policy, rollout_manager=rollout_manager, run=run, checkpoints=checkpoints, weight_publisher=weight_publisher
    )
    stop_signal.check()

    for step in range(run.first_step, settings.run.steps):
        with run.timed_rollout(rollout_manager.busy_s):
            rollouts = rollout_manager.generate(
                step, is_enough=partial(has_enough_rollouts, settings=settings, algorithm=algorithm, run=run, step=step)
            )
        num_gen_batches = rollout_manager.scheduler.num_generation_batches - run.history.num_generation_batches
        run.history.add(
            step, rollouts, num_new_batches=num_gen_batches, unfinished_prompts=rollout_manager.scheduler.unfinished_prompt_indices
        )
        step_settings = settings_at_step(run.history, settings, step=step)
        with timer("teacher") if step_settings.distill.generates_responses else nullcontext():
            responses = respond_as_teacher(rollouts, step_settings, policy, rollout_manager, step=step)

        with timer("update"), rollout_manager.offloaded():
            fetch_images = partial(image_exchange.fetch, rollouts=rollouts)
            minibatches = prepare_training_batch(
                rollouts, step_settings, policy, critic, algorithm=algorithm, fetch_images=fetch_images, step=step, responses=responses
            )
            if algorithm.needs_critic and critic is None and step == settings.critic.warmup_steps > 0:
                policy.restart_optimizer()  # otherwise AdamW counts the value head's warm-up steps for the backbone
            token_stats = build_token_stats(settings)
            update = partial(
                raise_on_nonfinite, run, policy, make_updaters(step_settings, policy, critic, algorithms, token_stats, check), step
            )
            with run.recording_mismatch(rollouts, step=step):
                updates = [update(batches) for batches in minibatches * settings.batch.epochs]
            if token_stats is not None:
                token_stats.write_to(rollouts)
            image_exchange.release()
            if merges_after(settings, step=step):
                policy.merge_checkpoint()
            publish_metrics = weight_publisher.publish(policy.hf_weights, step=step + 1) if weight_publisher else {}

        with timer("checkpoint"):
            checkpoints.begin_step(step + 1, is_last=step + 1 == settings.run.steps)

        with timer("sync"):
            rollout_manager.update_weights(policy.hf_weights(), version=step + 1)

        with timer("record"):
            metrics = (
                rollout_metrics(rollouts, num_gen_batches=num_gen_batches)
                | merge_update_metrics(updates)
                | value_errors(rollouts, step_settings.algo, algorithm)
            )
            metrics |= rollout_manager.metrics() | publish_metrics
            if step_settings.distill.generates_responses:
                metrics["distill/num_responses"] = float(len(responses))
            if settings.run.max_staleness > 0:
                metrics |= staleness_metrics(rollouts, step=step, num_stale=rollout_manager.num_stale)
            if step_settings.algo.kl_target > 0 and step >= settings.critic.warmup_steps:  # during warm-up no KL term acts on the policy
                metrics |= adapt_kl(run.history, rollouts, metrics, step_settings.algo)
            run.log_step(step, rollouts, metrics)
        del rollouts, responses, minibatches, fetch_images, token_stats, update  # free this step's images before those of the next
        evaluate_and_record(step, settings, rollout_manager=rollout_manager, run=run, checkpoints=checkpoints)
        stop_signal.check()
        if run.stops_early:
            break


def respond_as_teacher(
    rollouts: list[Rollout], settings: Settings, policy: Policy, rollout_manager: RolloutManager | RolloutReplay, *, step: int
) -> list[TokenSequence]:
    """Return the teacher's responses in contexts of the rollouts, with the thoughts as loss mask.

    Returns an empty list unless distill.apply_to=responses. The rollout engine contains the
    teacher's weights until the weight sync after the update.

    Raises:
        RunFailed: The engine failed.
    """
    if not settings.distill.generates_responses:
        return []
    assert isinstance(rollout_manager, RolloutManager), "a replay has no engine"
    rollout_manager.update_weights(policy.teacher_weights(), version=step)
    responses = generate_responses(rollout_manager, rollouts, fraction=settings.distill.response_fraction, step=step)
    check_failures(responses, limit=0.0)
    return sequences_with_loss(responses)


def restore_and_sync(
    settings: Settings, *, policy: Policy, rollout_manager: RolloutManager | RolloutReplay, run: Run, checkpoints: Checkpoints,
    weight_publisher: WeightPublisher | None,
) -> None:  # fmt: skip
    """Restore the newest checkpoint and send its weights to the engine and the weight publisher.

    The position of the prompt scheduler is restored too. If the previous attempt stopped before it
    recorded the evaluation of the restored step, this function runs the evaluation.
    """
    with run.step_timer("sync"):
        with rollout_manager.offloaded():
            checkpoints.restore()
            if weight_publisher is not None:
                weight_publisher.publish_initial(policy.hf_weights, step=run.first_step)
        rollout_manager.scheduler.num_generation_batches, rollout_manager.scheduler.pending_prompt_indices = (
            run.history.num_generation_batches,
            run.history.in_flight_prompts,
        )
        rollout_manager.update_weights(policy.hf_weights(), version=run.first_step)
    if run.history.pending_metrics:
        evaluate_and_record(run.first_step - 1, settings, rollout_manager=rollout_manager, run=run, checkpoints=checkpoints)
        checkpoints.mark_evaluated(history=run.history, metrics=run.metrics)


def evaluate_and_record(
    step: int, settings: Settings, *, rollout_manager: RolloutManager | RolloutReplay, run: Run, checkpoints: Checkpoints
) -> None:
    """Run the evaluation if one is due, record the step's metrics and finish its checkpoint.

    For the last step of the run, this function only records the metrics. Evaluation and checkpoint
    of the last step are completed at the end of the run.
    """
    metrics, is_last = run.history.pending_metrics, step + 1 == settings.run.steps
    if settings.run.eval_every and (step + 1) % settings.run.eval_every == 0 and not is_last:
        with run.step_timer("evaluate"):
            assert not isinstance(rollout_manager, RolloutReplay), "a replay has no evaluation"
            metrics = metrics | evaluate_in_run(rollout_manager.task, settings, rollout_manager=rollout_manager)
    with run.step_timer("record"):
        run.record(step, metrics)
    if not is_last:  # the last checkpoint is finished after the final evaluation
        with run.step_timer("checkpoint"):
            checkpoints.finish_step(step + 1, history=run.history, metrics=metrics)


def settings_at_step(history: History, settings: Settings, *, step: int) -> Settings:
    """Return the settings for a step, with the KL coefficient set by `adapt_kl`.

    Until the first checkpoint is merged (distill.merge), the step has no teacher.
    """
    if settings.distill.merge.method and not has_merge(settings, step=step):
        settings = replace(settings, distill=DistillSettings())
    return settings if history.kl_coef is None else replace(settings, algo=replace(settings.algo, kl_coef=history.kl_coef))


def value_errors(rollouts: list[Rollout], algo: AlgoSettings, algorithm: Algorithm) -> dict[str, float]:
    """Compute metrics that compare the critic's values with the returns; empty without a critic."""
    return value_metrics(*values_and_returns(rollouts, algo)) if algorithm.needs_critic else {}


def adapt_kl(history: History, rollouts: list[Rollout], metrics: Mapping[str, float], algo: AlgoSettings) -> dict[str, float]:
    """Set the next step's KL coefficient in `history`; return this step's coefficient as a metric.

    The coefficient does not change if every rollout was filtered out, since `metrics` then lacks
    policy/kl_ref.
    """
    history.kl_coef, kl = algo.kl_coef, metrics.get("policy/kl_ref")
    if kl is not None:
        num = sum(rollout.is_trained_on for rollout in rollouts)
        history.kl_coef = adaptive_kl_coef(algo.kl_coef, kl, target=algo.kl_target, num_episodes=num, horizon=algo.kl_horizon)
    return {"policy/kl_coef": algo.kl_coef}


def has_enough_rollouts(rollouts: list[Rollout], *, settings: Settings, algorithm: Algorithm, run: Run, step: int) -> bool:
    """Return True once the step has enough usable rollouts to train on.

    As a side effect, the rollouts are filtered (see `fills_batch`).

    Raises:
        RunFailed: Too many rollouts failed, or a reward or logprob is not finite.
    """
    check_failures(rollouts, limit=settings.run.max_failed_fraction)
    with run.dump_on_error(rollouts, step=step):
        require_finite(rollouts)
        return fills_batch(rollouts, settings, algorithm)


def fills_batch(rollouts: list[Rollout], settings: Settings, algorithm: Algorithm) -> bool:
    """Apply the filters to the rollouts and return True if enough groups remain for a step."""
    spread = group_std(rollouts, settings.algo)
    num_groups = settings.batch.prompts_per_step
    apply_filters(rollouts, settings.filter, num_groups=num_groups, group_std=spread, needs_group=algorithm.needs_group)
    return len(used_groups(rollouts)) >= num_groups


def make_updaters(
    settings: Settings, policy: Policy, critic: Critic | None, algorithms: Mapping[str, Algorithm], token_stats: TokenStats | None = None,
    check: MismatchCheck | None = None,
) -> Callable[[list[MicroBatch], int], dict[str, float]]:  # fmt: skip
    """Return a function (batches, step) -> metrics that runs one optimizer update.

    The function updates the policy and, if one exists, the critic. During the first
    critic.warmup_steps steps, only the critic or the value head is updated.
    """
    see = token_stats.record if token_stats is not None else None
    of_values = make_value_objective(settings.critic, level=settings.algo.gae_level)
    has_values = algorithms[settings.algo.name].needs_critic

    def update(batches: list[MicroBatch], step: int) -> dict[str, float]:
        of_policy = make_policy_objective(settings.algo, algorithms, distill=make_distill_term(settings.distill, step=step))
        warms_up = has_values and step < settings.critic.warmup_steps
        if critic is None:
            together = shared_value_loss(of_policy, of_values, settings.critic.vf_coef) if has_values else of_policy
            loss = warmup_value_loss(of_policy, of_values) if warms_up else together
            return policy.update(batches, loss, step=step, value_head_only=warms_up, record=see, check=check)
        metrics = {} if warms_up else policy.update(batches, of_policy, step=step, record=see, check=check)
        return metrics | critic.update(batches, of_values, step=step)

    return update


def raise_on_nonfinite(
    run: Run, policy: Policy, update: Callable[[list[MicroBatch], int], dict[str, float]], step: int, batches: list[MicroBatch]
) -> dict[str, float]:
    """Run one update; if it raises NonFiniteValue, save the micro-batches and re-raise the error.

    The micro-batches are saved in the run directory.
    """
    with run.dump_batches_on_error(batches, step=step, load_image_patches=policy.load_image_patches):
        return update(batches, step)
