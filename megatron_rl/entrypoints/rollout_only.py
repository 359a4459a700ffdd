"""Generates and records rollouts without a trainer (run.mode=rollout_only).

Each step generates the same episodes as the corresponding training step would with the initial
weights of the policy. If the run was killed, steps that are already recorded are not generated
again.
"""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

from megatron_rl.algo.algorithms import Algorithm
from megatron_rl.build import NoOffload, build_rollout_manager
from megatron_rl.config import Settings
from megatron_rl.distributed.image_exchange import ImageExchange
from megatron_rl.distributed.world import World, all_gather_object, long_timeout_group, raise_on_all_ranks, run_on_rank_zero
from megatron_rl.errors import GracefulStop, InfraOutage
from megatron_rl.models.hf_config import read_spec
from megatron_rl.observe.judge_stats import JudgeStats
from megatron_rl.observe.metrics import METRICS_FILE, read_metrics
from megatron_rl.observe.recorder import ROLLOUTS_FOLDER
from megatron_rl.observe.rollout_store import list_step_files, read_rollouts, step_number
from megatron_rl.observe.step_metrics import rollout_metrics
from megatron_rl.preflight.prompts import report_prompts
from megatron_rl.rollout.health import ServerSupervisor
from megatron_rl.rollout.manager import RunCallbacks
from megatron_rl.rollout.renderer import Renderer, max_inline_pixels
from megatron_rl.rollout.task import Task
from megatron_rl.run.history import History
from megatron_rl.run.record import Run
from megatron_rl.run.result import Result
from megatron_rl.run.shutdown import StopSignal
from megatron_rl.training_loop import has_enough_rollouts
from megatron_rl.types import Rollout
from megatron_rl.weights.formats.checkpoint_source import iterate_tensors
from megatron_rl.weights.formats.open_checkpoint import open_source


def run_rollout_only(
    settings: Settings, *, task: Task, algorithm: Algorithm, world: World, stop: StopSignal, supervisor: ServerSupervisor | None,
    closing: ExitStack,
) -> Result:  # fmt: skip
    """Generate and record the rollouts of all steps with the weights in model.path.

    All ranks must call this function together.
    """
    source = raise_on_all_ranks(lambda: open_source(Path(settings.model.path), read_spec(settings.model.path), key="model.path"))
    first, history = run_on_rank_zero(lambda: load_recorded_steps(Path(settings.run.dir)))
    run = Run(settings, world, num_steps=settings.run.steps, first_step=first, history=history)
    closing.callback(run.close)
    if task.judge is not None:
        run.judge_stats = JudgeStats(task.judge, gather=all_gather_object if world.size > 1 else lambda counts: [counts])
    reason = ""
    try:
        with run.step_timer("start"):
            allowed = settings.task.data.allow_grounding_tokens
            renderer = Renderer(settings.model, max_inline_pixels=max_inline_pixels(settings.engine), allow_grounding_tokens=allowed)
            image_exchange = ImageExchange(
                patch_size=renderer.patch_size, group=long_timeout_group(timeout_s=settings.parallel.straggler_timeout_s)
            )
            rollout_manager = build_rollout_manager(
                settings, task, trainer=NoOffload(), renderer=renderer, world=world, image_exchange=image_exchange,
                callbacks=RunCallbacks(run_with_grace=stop.run_with_grace, log=run.log), supervisor=supervisor,
            )  # fmt: skip
            closing.push(lambda failure, *_: rollout_manager.close(all_ranks=failure is None))
            rollout_manager.start()
            report_prompts(settings, rollout_manager=rollout_manager, log=run.log)
            rollout_manager.scheduler.num_generation_batches = history.num_generation_batches
        with run.step_timer("sync"):
            rollout_manager.update_weights(iterate_tensors(source), version=0)
        for step in range(first, settings.run.steps):
            stop.check()
            enough = partial(has_enough_rollouts, settings=settings, algorithm=algorithm, run=run, step=step)
            with run.timed_rollout(rollout_manager.busy_s):
                rollouts = rollout_manager.generate(step, is_enough=enough)
            rounds = rollout_manager.scheduler.num_generation_batches - run.history.num_generation_batches
            run.history.add(step, rollouts, num_new_batches=rounds)
            with run.step_timer("record"):
                metrics = compute_step_metrics(rollouts, settings, algorithm, num_gen_batches=rounds)
                run.history.num_learning_steps += "rollout/all_groups_zero_std" not in metrics
                run.log_step(step, rollouts, metrics)
            run.record(step, metrics)
        run.finish({})
    except GracefulStop:
        pass
    except InfraOutage as outage:
        if run.num_done == first:
            raise
        reason = str(outage)
    return Result(
        folder=run.folder, step=run.num_done, num_steps=run.num_steps, metrics={}, is_finished=run.is_finished, reason=reason
    )  # fmt: skip


def compute_step_metrics(rollouts: list[Rollout], settings: Settings, algorithm: Algorithm, *, num_gen_batches: int) -> dict[str, float]:
    """Compute advantages as in training and return the rollout metrics of a step.

    If advantages depend on model outputs, they cannot be computed without a trainer, and the
    metrics for groups with all-zero advantages are omitted.
    """
    if not algorithm.required_columns(settings.algo):
        algorithm.advantage_fn(rollouts, settings.algo)
        return rollout_metrics(rollouts, num_gen_batches=num_gen_batches)
    silent = ("rollout/all_groups_zero_std", "rollout/zero_std_fraction")
    return {name: value for name, value in rollout_metrics(rollouts, num_gen_batches=num_gen_batches).items() if name not in silent}


def load_recorded_steps(folder: Path) -> tuple[int, History]:
    """Return a pair: the number of steps that earlier attempts recorded, and the run's history."""
    paths, history = list_step_files(folder / ROLLOUTS_FOLDER), History()
    if not paths:
        return 0, history
    lines = [line for line in read_metrics(folder / METRICS_FILE) if line["step"] <= step_number(paths[-1])]
    done = len(lines)
    for path in paths:
        if step_number(path) < done:
            history.add(step_number(path), read_rollouts(path, with_images=False), num_new_batches=0)
    history.num_generation_batches = int(sum(line["rollout/num_gen_batches"] for line in lines))
    return done, history
