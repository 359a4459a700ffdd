"""Entry point for training: builds a run from its settings on every rank and runs one stage.

User-defined tasks, reward functions and algorithms are passed in as `Plugins`.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from megatron_rl.algo.algorithms import ALGORITHMS
from megatron_rl.build import StageSettings, TrainerContext, build_context, episode_settings, generation_settings
from megatron_rl.config import Settings
from megatron_rl.distributed.hang_watchdog import HangWatchdog
from megatron_rl.distributed.world import (
    World,
    connect,
    disconnect,
    expand_segments,
    raise_on_all_ranks,
    read_world,
    trim_malloc,
)
from megatron_rl.dtypes import resolve_dtypes
from megatron_rl.entrypoints.rollout_only import run_rollout_only
from megatron_rl.errors import GracefulStop, InfraOutage, RunDenied, RunFailed
from megatron_rl.evaluation.in_run import evaluate_in_run
from megatron_rl.preflight.nodes import check_nodes
from megatron_rl.preflight.prompts import report_column_warnings, report_prompts
from megatron_rl.preflight.run_checks import check_run, plan_gpu_bytes, print_plan
from megatron_rl.registry import Plugins, build_task
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.replay import RolloutReplay
from megatron_rl.rollout.weight_publisher import WeightPublisher
from megatron_rl.run.directory import locked, newest_saved_step
from megatron_rl.run.failure_checks import check_improvement
from megatron_rl.run.model_card import make_model_card
from megatron_rl.run.paths import ADAPTER_FOLDER, explain_write_errors
from megatron_rl.run.result import Result
from megatron_rl.run.shutdown import CLOSE_TIMEOUT_S, StopSignal
from megatron_rl.services.address import token_file
from megatron_rl.services.engine_servers import ENGINES_TOKEN_NAME, run_engine_servers
from megatron_rl.services.service_launcher import enabled_services, resolve_addresses, run_services
from megatron_rl.sft import load_step_demonstrations, train_sft
from megatron_rl.training_loop import train

T = TypeVar("T")


@dataclass(slots=True, frozen=True, kw_only=True)
class TrainingStage:
    """Definition of a training stage, such as RL or SFT."""

    num_steps: Callable[[Settings], int]
    """Function that returns the number of training steps for the given settings."""
    splits: tuple[str, ...]
    """Data splits of the task that must contain examples."""
    is_rl: bool
    """True for RL. An RL stage computes logprobs at the sampling temperature (algo.temperature) and
    keeps the weights of the reference model if the settings require a reference model.
    """
    run: Callable[[Settings, TrainerContext], RolloutManager | None]
    """Function that trains the policy and returns the rollout manager with the trained weights, or
    None if the stage has no rollout engine.
    """


def run_rl(settings: Settings, context: TrainerContext) -> RolloutManager:
    """Run RL training with rollout engines and return the rollout manager."""
    load_demonstrations(settings, context)
    rollout_manager = context.build_rollout_manager(settings)
    with context.run.step_timer("start"):
        report_prompts(settings, rollout_manager=rollout_manager, log=context.run.log)
    weight_publisher = WeightPublisher(settings.weight_publish, run=settings.run.dir, is_main=context.world.is_main, log=context.run.log)
    _run_training_loop(context, rollout_manager, weight_publisher)
    return rollout_manager


def run_replay(settings: Settings, context: TrainerContext) -> None:
    """Run RL training on recorded rollouts (run.mode=replay), without a rollout engine."""
    load_demonstrations(settings, context)
    rollout_manager = RolloutReplay(
        Path(settings.rollouts.replay_from), world=context.world, gather_rollouts=context.image_exchange.gather_rollouts,
        generation_settings=generation_settings(settings), episode_settings=episode_settings(settings),
    )  # fmt: skip
    _run_training_loop(context, rollout_manager, None)


def load_demonstrations(settings: Settings, context: TrainerContext) -> None:
    """Load the demonstrations among the rollouts of each step (distill.data_fraction)."""
    given = {"task": context.task, "renderer": context.renderer, "log": context.run.log}
    with context.run.step_timer("start"):
        context.policy.demonstrations = raise_on_all_ranks(partial(load_step_demonstrations, settings, **given))


def _run_training_loop(
    context: TrainerContext, rollout_manager: RolloutManager | RolloutReplay, weight_publisher: WeightPublisher | None
) -> None:
    with context.checkpoints.wait_for_save_on_failure(context.run):
        train(
            context.run, policy=context.policy, critic=context.critic, rollout_manager=rollout_manager,
            image_exchange=context.image_exchange, checkpoints=context.checkpoints, stop_signal=context.stop,
            algorithms=context.algorithms, weight_publisher=weight_publisher,
        )  # fmt: skip


def run_sft(settings: Settings, context: TrainerContext) -> RolloutManager:
    """Run supervised fine-tuning and return a rollout manager for the final evaluation."""
    policy, run = context.policy, context.run
    parts = {"task": context.task, "renderer": context.renderer, "checkpoints": context.checkpoints, "stop_signal": context.stop}
    report_column_warnings({"eval": context.task.examples("eval")}, log=run.log)
    train_sft(settings, policy=policy, run=run, teacher_alone=context.algorithms[settings.algo.name].needs_teacher, **parts)
    rollout_manager = context.build_rollout_manager(settings)
    with run.step_timer("sync"):
        rollout_manager.update_weights(policy.hf_weights(), version=0)
    return rollout_manager


STAGES: Mapping[str, TrainingStage] = {
    "rl": TrainingStage(num_steps=lambda s: s.run.steps, splits=("train", "eval"), is_rl=True, run=run_rl),
    "sft": TrainingStage(num_steps=lambda s: sum(s.sft.steps), splits=("eval",), is_rl=False, run=run_sft),
}
"""Training stages, keyed by the setting `stage`."""
REPLAY = TrainingStage(num_steps=lambda s: s.run.steps, splits=(), is_rl=True, run=run_replay)
"""Training stage for stage=rl with run.mode=replay."""


def run(settings: Settings, plugins: Plugins = Plugins()) -> Result | None:
    """Run the configured training stage and return the result. All ranks must call this function.

    The result is None with plan.only, which only prints the memory plan. The function can be called
    in a notebook, and more than once in the same process.
    """
    world = read_world()
    settings = resolve_dtypes(settings, on_gpu=settings.plan.only or None)  # the plan is for GPUs
    if settings.plan.only:
        print_plan(settings, world, plugins)
        return None
    with StopSignal(grace_s=settings.run.grace_s, close_timeout_s=max(CLOSE_TIMEOUT_S, settings.parallel.timeout_s)) as stop:
        result = run_in_own_thread(lambda: run_attempt(settings, plugins, world=world, stop=stop))
    if world.is_main:
        print(result, flush=True)
    return result


def run_in_own_thread(action: Callable[[], T]) -> T:
    """Run `action` and return its result.

    A new thread is used if the current thread has a running event loop, as in Jupyter.
    """
    try:
        has_loop = asyncio.get_running_loop().is_running()
    except RuntimeError:
        has_loop = False
    if not has_loop:
        return action()
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(action).result()


def run_attempt(settings: Settings, plugins: Plugins, *, world: World, stop: StopSignal) -> Result:
    """Run one attempt: build all components, train, finalize and close all components."""
    timeout_s, folder = settings.parallel.timeout_s, Path(settings.run.dir)
    stage = REPLAY if settings.run.mode == "replay" else STAGES[settings.stage]
    trim_malloc()
    watch = HangWatchdog(world, folder=folder, timeout_s=timeout_s)
    if world.device.type == "cuda" and (settings.engine.tp == 1 or settings.engine.mode == "server"):
        expand_segments()
    needed = plan_gpu_bytes(settings, plugins, world=world)
    with ExitStack() as closing:
        connect(world, timeout_s=timeout_s)
        closing.callback(disconnect)
        with watch:
            settings, task = raise_on_all_ranks(partial(check_run, settings, plugins, world=world, needed=needed, splits=stage.splits))
            num_steps = stage.num_steps(settings)
            standing = closing.enter_context(locked(settings))
            if standing.is_finished:
                found = standing.evaluation
                return Result(folder=folder, step=num_steps, num_steps=num_steps, metrics=found, is_finished=True, is_new=False)
            check_nodes(settings, world)
            try:
                if enabled_services(settings.services) and stage is not REPLAY:
                    urls = closing.enter_context(run_services(settings, world, raise_if_stopped=stop.check_start))
                    task = build_task(resolve_addresses(settings.task, urls, run=folder), plugins)
                supervisor, rollout_settings = None, settings
                if settings.engine.num_local_servers and stage is not REPLAY:
                    urls, supervisor = closing.enter_context(run_engine_servers(settings, world, raise_if_stopped=stop.check_start))
                    asked = replace(settings.engine, urls=urls, num_local_servers=0, token_file=str(token_file(folder, ENGINES_TOKEN_NAME)))
                    rollout_settings = replace(settings, engine=asked)
            except GracefulStop:
                step = raise_on_all_ranks(lambda: newest_saved_step(folder))
                return Result(folder=folder, step=step, num_steps=num_steps, metrics={}, is_finished=False)
            if settings.run.mode == "rollout_only":
                algorithm = {**ALGORITHMS, **plugins.algorithms}[settings.algo.name]
                return run_rollout_only(
                    rollout_settings, task=task, algorithm=algorithm, world=world, stop=stop, supervisor=supervisor, closing=closing
                )
            context = build_context(
                settings, resume_state=standing, task=task, plugins=plugins, world=world, stop=stop, closing=closing,
                stage=StageSettings(num_steps=num_steps, is_rl=stage.is_rl, is_replay=stage is REPLAY),
            )  # fmt: skip
            context.supervisor, context.run.callbacks = supervisor, plugins.callbacks
            reason = train_and_finalize(settings, context, lambda: stage.run(rollout_settings, context))
            done = context.run
            return Result(
                folder=folder, step=done.num_done, num_steps=num_steps, metrics=done.evaluation, is_finished=done.is_finished, reason=reason
            )  # fmt: skip


def train_and_finalize(settings: Settings, context: TrainerContext, run_stage: Callable[[], RolloutManager | None]) -> str:
    """Train and finalize, or save a checkpoint if training stops early.

    Returns:
        The message of the InfraOutage that stopped the run; "" if the run finished or a stop was
        requested.

    Raises:
        InfraOutage: An outage occurred before this attempt completed a step, so another attempt is
            likely to fail in the same way.
        RunDenied: A server rejected the key or token. The run cannot be resumed until the key or
            token is corrected.
    """
    try:
        finalize(settings, context, run_stage())
    except GracefulStop:
        context.save_progress()
    except RunDenied:
        context.save_progress()
        raise
    except InfraOutage as outage:
        context.save_progress()
        if context.run.num_done == context.run.first_step:
            raise
        return str(outage)
    return ""


def finalize(settings: Settings, context: TrainerContext, rollout_manager: RolloutManager | None) -> None:
    """Evaluate the trained policy and save it as a Hugging Face folder.

    Without a rollout manager, the evaluation is skipped. The model is saved even if the evaluation
    failed or the last checkpoint could not be written.
    """
    policy, record, checkpoints = context.policy, context.run, context.checkpoints
    context.stop.check()
    with record.step_timer("evaluate"):
        if rollout_manager:
            num = len(rollout_manager.task.examples("eval"))
            sampled = f", {settings.task.eval_samples} sampled" if settings.task.eval_samples else ""
            record.log(f"final evaluation: {num} examples; episodes per example: 1 greedy{sampled}")
        evaluation, failure = final_evaluation(settings, rollout_manager) if rollout_manager else ({}, None)
    with record.step_timer("checkpoint"):
        if record.stops_early and settings.checkpoint.save_last and rollout_manager:  # nobody knew that the step was the last one
            with rollout_manager.offloaded():
                checkpoints.save(record.num_done, history=record.history, metrics=evaluation)
        if failure is None and record.first_step == record.num_steps:  # an earlier attempt completed all steps
            checkpoints.mark_evaluated(history=record.history, metrics=evaluation)
        try:
            checkpoints.finish_step(record.num_steps, history=record.history, metrics=evaluation)
            checkpoints.wait_for_save()
        except OSError as error:  # raised on every rank; the partial checkpoint was removed, so the model may fit on the disk
            failure = failure or error
    card = make_model_card(settings, metrics=evaluation, num_steps=record.num_steps, folder=record.final_folder)
    with record.step_timer("save"), explain_write_errors(record.folder), rollout_manager.offloaded() if rollout_manager else nullcontext():
        policy.save_hf(record.final_folder, card=card)
        if settings.lora.rank:
            policy.save_adapter(record.folder / ADAPTER_FOLDER)
    if failure is not None:
        raise failure
    if STAGES[settings.stage].is_rl and settings.run.require_improvement:
        check_improvement(record.history.returns)
    record.finish(evaluation)


def final_evaluation(settings: Settings, rollout_manager: RolloutManager) -> tuple[dict[str, float], RunFailed | None]:
    """Run the final evaluation and return a pair (metrics, error).

    The error is to be raised after the policy is saved; it is None if the evaluation succeeded.
    """
    try:
        return evaluate_in_run(rollout_manager.task, settings, rollout_manager=rollout_manager), None
    except RunFailed as failure:
        return {}, failure
