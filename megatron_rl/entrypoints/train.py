"""The composition root: settings in, parts built on every rank, one stage run. Choices are plain dicts; a user's task is an argument."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from megatron_rl.algo.algorithms import ALGORITHMS
from megatron_rl.algo.rollout_correction import mismatch_metrics
from megatron_rl.build import build_critic, build_policy
from megatron_rl.config import Settings
from megatron_rl.data.data_digests import check_same_data, data_digests
from megatron_rl.distributed.hang_watchdog import HangWatchdog
from megatron_rl.distributed.image_exchange import ImageExchange
from megatron_rl.distributed.world import (
    World,
    connect,
    disconnect,
    expand_segments,
    gather,
    long_timeout_group,
    raise_on_all_ranks,
    read_world,
    run_on_rank_zero,
    trim_malloc,
)
from megatron_rl.entrypoints.rollout_only import collect
from megatron_rl.entrypoints.stages import REPLAY, STAGES, TrainerContext, TrainingStage
from megatron_rl.errors import GracefulStop, InfraOutage, RunDenied, RunFailed
from megatron_rl.evaluation.in_run import evaluate
from megatron_rl.memory_plan.gpu_memory import plan
from megatron_rl.memory_plan.gpu_specs import at_hand
from megatron_rl.memory_plan.host_memory import host_misfit
from megatron_rl.memory_plan.plan_report import dry_run
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.known_models import known_spec
from megatron_rl.observe.judge_stats import JudgeStats
from megatron_rl.observe.metrics import check_trackio, check_wandb
from megatron_rl.policy.kernels import transformer_engine_error
from megatron_rl.policy.parallel import build_layout, leave_layout
from megatron_rl.preflight.gpus import check_gpus, visible_gpus
from megatron_rl.preflight.nodes import check_nodes
from megatron_rl.registry import Plugins, build_task, check_examples, check_settings, check_sizes, has_critic, uses_sandbox
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.renderer import Renderer, small_pixels
from megatron_rl.rollout.replay import check_recorded
from megatron_rl.rollout.task import Task
from megatron_rl.rollout.vllm.server_api import check_servers
from megatron_rl.run.checkpoint_state import CheckpointState, InputDigests
from megatron_rl.run.checkpoints import Checkpoints, find_checkpoint
from megatron_rl.run.directory import ResumeState, locked, saved_step
from megatron_rl.run.failure_checks import check_improvement
from megatron_rl.run.model_card import make_model_card
from megatron_rl.run.record import ADAPTER, Result, Run, atomic_file
from megatron_rl.run.shutdown import CLOSE_TIMEOUT_S, StopSignal
from megatron_rl.services.address import token_file
from megatron_rl.services.engine_servers import ENGINES, check_started, engines
from megatron_rl.services.service_launcher import addressed, chosen, serving
from megatron_rl.weights.formats.model_digests import check_same_model, model_digests

T = TypeVar("T")


def run(settings: Settings, own: Plugins = Plugins()) -> Result | None:
    """Run the stage, and say how it ended; None where run.dry asks for the plan alone. On every rank.

    In a notebook, too, and again in the same process.
    """
    world = read_world()
    if settings.run.dry:
        print_plan(settings, world, own)
        return None
    with StopSignal(grace_s=settings.run.grace_s, closing_s=max(CLOSE_TIMEOUT_S, settings.parallel.timeout_s)) as stop:
        result = run_in_own_thread(lambda: run_attempt(settings, own, world=world, stop=stop))
    if world.is_main:
        print(result, flush=True)
    return result


def run_in_own_thread(act: Callable[[], T]) -> T:
    """A notebook's thread runs an event loop already, and the engine has its own: there the act has a thread to itself."""
    try:
        has_loop = asyncio.get_running_loop().is_running()
    except RuntimeError:
        has_loop = False
    if not has_loop:
        return act()
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(act).result()


def run_attempt(settings: Settings, own: Plugins, *, world: World, stop: StopSignal) -> Result:
    """A life of the run, from the building of its parts to their end."""
    timeout_s, folder = settings.parallel.timeout_s, Path(settings.run.dir)
    stage = REPLAY if settings.run.replay else STAGES[settings.stage]
    trim_malloc()
    watch, num_steps = HangWatchdog(world, folder=folder, timeout_s=timeout_s), stage.num_steps(settings)
    if world.device.type == "cuda" and (settings.engine.tp == 1 or settings.engine.mode == "server"):
        expand_segments()
    needed = plan_gpu_bytes(settings, own, world=world)
    with ExitStack() as closing:
        connect(world, timeout_s=timeout_s)
        closing.callback(disconnect)
        with watch:
            task = raise_on_all_ranks(lambda: preflight(settings, own, world=world, needed=needed, splits=stage.splits))
            standing = closing.enter_context(locked(settings))
            if standing.is_finished:
                found = standing.evaluation
                return Result(folder=folder, step=num_steps, num_steps=num_steps, metrics=found, is_finished=True, is_new=False)
            check_nodes(settings, world)
            try:
                if chosen(settings.services) and stage is not REPLAY:
                    urls = closing.enter_context(serving(settings, world, go_on=stop.check_start))
                    task = build_task(addressed(settings.task, urls, run=folder), own)
                household, playing = None, settings
                if settings.engine.num_local_servers and stage is not REPLAY:
                    urls, household = closing.enter_context(engines(settings, world, go_on=stop.check_start))
                    asked = replace(settings.engine, urls=urls, servers=0, token_file=str(token_file(folder, ENGINES)))
                    playing = replace(settings, engine=asked)
            except GracefulStop:
                step = raise_on_all_ranks(lambda: saved_step(folder))
                return Result(folder=folder, step=step, num_steps=num_steps, metrics={}, is_finished=False)
            if settings.run.rollout_only:
                algorithm = {**ALGORITHMS, **own.algorithms}[settings.algo.name]
                return collect(playing, task=task, algorithm=algorithm, world=world, stop=stop, household=household, closing=closing)
            parts = build_context(settings, stage, standing=standing, task=task, own=own, world=world, stop=stop, closing=closing)
            parts.household = household
            reason = train_and_finalize(settings, parts, lambda: stage.run(playing, parts))
            done = parts.run
            return Result(
                folder=folder, step=done.num_done, num_steps=num_steps, metrics=done.evaluation, is_finished=done.is_finished, reason=reason
            )  # fmt: skip


def train_and_finalize(settings: Settings, parts: TrainerContext, play: Callable[[], RolloutManager | None]) -> str:
    """Play and finish, or keep what is done. Returns what has stopped the run, where nobody asked for it.

    InfraOutage: this life has done no step, so that another one would only meet the same. RunDenied: no life goes on before the key is
    right.
    """
    try:
        finalize(settings, parts, play())
    except GracefulStop:
        parts.save_progress()
    except RunDenied:
        parts.save_progress()
        raise
    except InfraOutage as outage:
        parts.save_progress()
        if parts.run.num_done == parts.run.first_step:
            raise
        return str(outage)
    return ""


def plan_gpu_bytes(settings: Settings, own: Plugins, *, world: World) -> int | ValueError | OSError:
    """What the plan needs of the fullest GPU, of the memory that the smallest one here has, or why there is none that fits: main memory
    counts where it is stated, for what a run may need of it is seldom needed at once. 0 on CPUs, and on all but the first process of a
    node. Before the processes meet: the plan makes up a world of its own, what is wrong is for all to hear."""
    if world.device.type != "cuda" or not world.is_first_here:
        return 0
    try:
        model = read_spec(settings.model.path)
        check_sizes(settings, model, world.size, own)
        memory = min(gpu.memory for gpu in visible_gpus()[: world.local_size])
        settings = replace(settings, run=replace(settings.run, gpu=at_hand(memory, named=settings.run.gpu)))
        given = {"has_values": has_critic(settings, own), "has_boxes": uses_sandbox(settings, own), "memory": memory}
        planned = plan(model, settings, world_size=world.size, **given)
        misfit = host_misfit(planned.host, settings, world_size=world.local_size, here=True) if settings.run.host_gb else ""
        return ValueError(misfit) if misfit else planned.peak
    except (ValueError, OSError) as trouble:
        return trouble


def preflight(settings: Settings, own: Plugins, *, world: World, needed: int | ValueError | OSError, splits: tuple[str, ...]) -> Task:
    """The task, and what can be known of a run before anything of it is built. `needed`: see planned_bytes; `splits` must have examples."""
    check_gpus(settings, world, needed=needed)
    task = build_task(settings.task, own)
    check_settings(settings, world.size, own)
    if world.is_main:
        check_wandb(settings.wandb)
        check_trackio(settings.trackio)
        if settings.run.replay:
            check_recorded(settings)
        else:
            check_servers(settings)
            check_started(settings, num_ranks=world.local_size)
    check_examples(task, splits)
    return task


def build_context(
    settings: Settings, stage: TrainingStage, *, standing: ResumeState, task: Task, own: Plugins, world: World, stop: StopSignal, closing:
    ExitStack
) -> TrainerContext:  # fmt: skip
    """All but the engines, on every rank; where the run goes on, it is found here."""
    group = long_timeout_group(timeout_s=settings.parallel.straggler_timeout_s)
    checkpoint, state = find_checkpoint(settings, group=group)
    inputs = run_on_rank_zero(lambda: digest_inputs(settings, state if checkpoint else None), group=group)
    started = standing.describe_start(Path(settings.run.dir), checkpoint)
    if started and world.is_main:
        print(started, flush=True)
    num_steps = stage.num_steps(settings)
    layout = build_layout(settings.parallel, seed=settings.run.seed)
    closing.callback(leave_layout)
    renderer = raise_on_all_ranks(lambda: build_renderer(settings, continues_contexts=stage.is_rl and task.continues_contexts))
    algorithms, has_values = {**ALGORITHMS, **own.algorithms}, has_critic(settings, own)
    gallery = ImageExchange(patch=renderer.patch, group=group)
    patches = partial(renderer.patches, picture_of=gallery.image)
    policy = build_policy(
        settings, layout, renderer, patches=patches, num_steps=num_steps, is_rl=stage.is_rl, has_values=has_values
    )  # fmt: skip
    closing.callback(policy.close)
    has_trunk = has_values and settings.critic.backbone == "own"
    critic = build_critic(settings, layout, patches=patches, num_steps=num_steps) if has_trunk else None
    if critic is not None:
        closing.callback(critic.close)
    record = Run(settings, world, num_steps=num_steps, first_step=state.step, history=state.history)
    closing.callback(record.close)
    if task.judge is not None and stage is not REPLAY:
        record.judge = JudgeStats(task.judge, gather=gather if world.size > 1 else lambda counts: [counts])
    for line in (transformer_engine_error(), *mismatch_metrics(settings)):
        if line:
            record.log(line)
    checkpoints = Checkpoints(settings, policy, critic, start=checkpoint, inputs=inputs, group=group)
    return TrainerContext(
        world=world, task=task, algorithms=algorithms, renderer=renderer, policy=policy, critic=critic, run=record,
        checkpoints=checkpoints, stop=stop, gallery=gallery, closing=closing,
    )  # fmt: skip


def digest_inputs(settings: Settings, state: CheckpointState | None) -> InputDigests:
    """Return the digests of the model and the data. ValueError: they are not those of the run that goes on from `state`."""
    found = InputDigests(model=model_digests(Path(settings.model.path)), data=data_digests(settings.task.data))
    if state is not None:
        check_same_model(state.inputs.model, found.model, key="model.path", folder=settings.model.path)
        check_same_data(state.inputs.data, found.data)
    return found


def build_renderer(settings: Settings, *, continues_contexts: bool) -> Renderer:
    """Load the processor and the chat template. Raises ValueError where they do not fit the model or the task's episodes."""
    allowed = settings.task.data.allow_grounding_tokens
    renderer = Renderer(settings.model, small_pixels=small_pixels(settings.engine), allow_grounding_tokens=allowed)
    if continues_contexts:
        renderer.require_continuation()
    return renderer


def finalize(settings: Settings, parts: TrainerContext, fleet: RolloutManager | None) -> None:
    """Evaluate what was trained, where there are engines, and save it; it is saved although the evaluation failed, or the checkpoint had no
    room."""
    policy, record, checkpoints = parts.policy, parts.run, parts.checkpoints
    parts.stop.check()
    with record.spans("evaluate"):
        if fleet:
            num = len(fleet.task.examples("eval"))
            record.log(f"final evaluation: {num} examples, {1 + settings.task.eval_samples} episodes each")
        evaluation, failure = final_evaluation(settings, fleet) if fleet else ({}, None)
    with record.spans("checkpoint"):
        if failure is None and record.first_step == record.num_steps:  # all was trained by an earlier life
            checkpoints.mark_evaluated(history=record.history, metrics=evaluation)
        try:
            checkpoints.finish_step(record.num_steps, history=record.history, metrics=evaluation)
            checkpoints.wait_for_save()
        except OSError as error:  # the same on every rank; what was written of it is gone, which may make room for the model
            failure = failure or error
    card = make_model_card(settings, metrics=evaluation, num_steps=record.num_steps, folder=record.final)
    with record.spans("save"), atomic_file(record.folder), fleet.offloaded() if fleet else nullcontext():
        policy.save_hf(record.final, card=card)
        if settings.lora.rank:
            policy.save_adapter(record.folder / ADAPTER)
    if failure is not None:
        raise failure
    if STAGES[settings.stage].is_rl and settings.run.require_improvement:
        check_improvement(record.history.returns)
    record.finish(evaluation)


def final_evaluation(settings: Settings, fleet: RolloutManager) -> tuple[dict[str, float], RunFailed | None]:
    """The last evaluation, or why there is none. That is for the run's end: what was trained is saved first."""
    try:
        return evaluate(fleet.task, settings, fleet=fleet), None
    except RunFailed as failure:
        return {}, failure


def print_plan(settings: Settings, world: World, own: Plugins) -> None:
    """Print the plan of memory on the main rank; a released model's name on the hub is enough of a model.path."""
    model, size = known_spec(settings.model.path), settings.run.world or world.size
    check_sizes(settings, model, size, own)
    if world.is_main:
        dry_run(model, settings, world_size=size, has_values=has_critic(settings, own), has_boxes=uses_sandbox(settings, own))
