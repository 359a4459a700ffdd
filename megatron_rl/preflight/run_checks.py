"""Checks of a run before the model is built, and the memory plan that plan.only prints."""

import math
from dataclasses import replace

from megatron_rl.config import Settings, require
from megatron_rl.distributed.world import World
from megatron_rl.memory_plan.gpu_memory import plan_gpu_memory
from megatron_rl.memory_plan.gpu_specs import closest_gpu_name
from megatron_rl.memory_plan.host_memory import host_memory_error
from megatron_rl.memory_plan.plan_report import print_memory_plan
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.known_models import load_known_spec
from megatron_rl.observe.metrics import check_trackio, check_wandb
from megatron_rl.preflight.gpus import check_gpus, visible_gpus
from megatron_rl.preflight.settings import (
    check_examples,
    check_num_steps,
    check_privileged_prompt,
    check_settings,
    check_sizes,
    check_teacher_sources,
)
from megatron_rl.registry import Plugins, build_task, has_critic, uses_sandbox
from megatron_rl.rollout.replay import require_recorded_steps
from megatron_rl.rollout.task import Task
from megatron_rl.rollout.vllm.server_api import check_servers
from megatron_rl.services.engine_servers import check_started


def plan_gpu_bytes(settings: Settings, plugins: Plugins, *, world: World) -> int | ValueError | OSError:
    """Return the largest planned peak memory of any of the run's GPUs, in bytes.

    If the plan does not fit, the error is returned instead of raised, so that all ranks can raise
    it. The result is 0 on CPUs, and on all processes except the first process of each node. The
    plan is made for the smallest GPU of this node. Host memory is checked only if plan.host_gb is
    set, because a run rarely uses all of the planned host memory at once. Call this function before
    the process groups exist, because the plan creates its own process group.
    """
    if world.device.type != "cuda" or not world.is_local_main:
        return 0
    try:
        model = read_spec(settings.model.path)
        check_sizes(settings, model, world.size, plugins)
        memory = min(gpu.memory_bytes for gpu in visible_gpus()[: world.local_size])
        settings = replace(settings, plan=replace(settings.plan, gpu=closest_gpu_name(memory, preferred=settings.plan.gpu)))
        given = {"has_values": has_critic(settings, plugins), "uses_sandbox": uses_sandbox(settings, plugins), "memory": memory}
        planned = plan_gpu_memory(model, settings, world_size=world.size, **given)
        misfit = (
            host_memory_error(planned.host, settings, world_size=world.local_size, on_this_machine=True) if settings.plan.host_gb else ""
        )
        return ValueError(misfit) if misfit else planned.peak_bytes
    except (ValueError, OSError) as trouble:
        return trouble


def check_run(
    settings: Settings, plugins: Plugins, *, world: World, needed: int | ValueError | OSError, splits: tuple[str, ...]
) -> tuple[Settings, Task]:
    """Build the task, and check everything that can be checked before the model is built.

    Returns the settings with the number of steps that run.epochs results in, and the task.

    Args:
        settings: Settings of the run.
        plugins: The user's tasks, rewards and algorithms.
        world: Rank and device of this process, and the number of processes in the job.
        needed: Result of `plan_gpu_bytes`.
        splits: Splits of the task that must have examples.
    """
    replay_from, remedy = settings.rollouts.replay_from, "is for launch/rescore.py and run.mode=replay; add run.mode=replay"
    require(settings.run.mode == "replay" or not replay_from, "rollouts.replay_from", replay_from, remedy)
    check_gpus(settings, world, needed=needed)
    task = build_task(settings.task, plugins)
    if "train" in splits:
        settings = resolve_epochs(settings, task)
    check_settings(settings, world.size, plugins)
    if world.is_main:
        check_wandb(settings.wandb)
        check_trackio(settings.trackio)
        if settings.run.mode == "replay":
            require_recorded_steps(settings)
        else:
            check_servers(settings)
            check_started(settings, num_ranks=world.local_size)
    check_examples(task, splits)
    if "train" in splits and settings.stage == "rl":
        check_teacher_sources(task, settings, plugins)
        check_privileged_prompt(task, settings)
    return settings, task


def resolve_epochs(settings: Settings, task: Task) -> Settings:
    """Return the settings with run.steps set according to run.epochs; unchanged if it is 0.

    Example: 0.5 epochs of 100 examples with 16 prompts per step are 4 steps.
    """
    if settings.run.epochs == 0:
        return settings
    steps = settings.run.epochs * len(task.examples("train")) / settings.batch.prompts_per_step
    # 0.1 * 3 * 10 is slightly more than 3
    settings = replace(settings, run=replace(settings.run, steps=max(1, math.ceil(round(steps, 6)))))
    check_num_steps(settings)
    return settings


def print_plan(settings: Settings, world: World, plugins: Plugins) -> None:
    """Print the memory plan on the main rank.

    model.path may also be the name of a known model on the Hugging Face Hub. In this case, the
    model's files are not needed.
    """
    model, size = load_known_spec(settings.model.path), settings.plan.world_size or world.size
    check_sizes(settings, model, size, plugins)
    if world.is_main:
        parts = {"has_values": has_critic(settings, plugins), "uses_sandbox": uses_sandbox(settings, plugins)}
        print_memory_plan(model, settings, world_size=size, **parts)
