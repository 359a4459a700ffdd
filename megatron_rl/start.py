"""The composition root: settings in, parts built on every rank, one stage run. Choices are plain dicts; a user's task is an argument."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from transformers import Qwen2_5_VLConfig

from megatron_rl.config import EngineSettings, Settings, TaskSettings, require
from megatron_rl.evaluate import evaluate
from megatron_rl.models.hf_config import read_config
from megatron_rl.models.released import known_config
from megatron_rl.plan.dry import dry_run
from megatron_rl.policy.parallel import Layout, build_layout, check_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.rollout.collect import Crew
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.run import Run, check_improvement, writing
from megatron_rl.run_states import Checkpoints, find
from megatron_rl.sft import warm_start
from megatron_rl.tasks.base import Task
from megatron_rl.tasks.gym_cards.task import NumberLineTask
from megatron_rl.tasks.visual_python.task import VisualPythonTask
from megatron_rl.tasks.visual_search.task import VisualSearchTask
from megatron_rl.tasks.vqa import VqaTask
from megatron_rl.train import train
from megatron_rl.types import RunFailed
from megatron_rl.world import World, connect, place

TASKS: Mapping[str, Callable[[TaskSettings], Task]] = {
    "number_line": NumberLineTask,
    "visual_python": VisualPythonTask,
    "visual_search": VisualSearchTask,
    "vqa": VqaTask,
}


def run(settings: Settings, *, tasks: Mapping[str, Callable[[TaskSettings], Task]] | None = None) -> None:
    """Build the parts on every rank and run the stage. `tasks` adds a user's own to those that ship: {"mine": MyTask}."""
    world = place()
    if settings.run.dry:
        rehearse(settings, world)
        return
    task = build_task(settings.task, {**TASKS, **(tasks or {})})
    check(settings, world.size)
    check_examples(task, settings.stage)
    connect(world, timeout_s=settings.parallel.timeout_s)
    checkpoint, memory = find(settings)
    is_sft = settings.stage == "sft"
    key, num_steps = ("sft.steps", sum(settings.sft.steps)) if is_sft else ("run.steps", settings.run.steps)
    require(memory.step <= num_steps, key, num_steps, f"{checkpoint} has {memory.step} steps; ask for as many, or choose another run.dir")
    layout = build_layout(settings.parallel, seed=settings.run.seed)
    renderer = Renderer(settings.model)
    policy = build_policy(settings, layout, renderer, num_steps=num_steps)
    record = Run(settings, world, num_steps=num_steps, first_step=memory.step, history=memory.history)
    checkpoints = Checkpoints(settings, policy, start=checkpoint)
    if is_sft:
        warm_start(settings, task=task, policy=policy, renderer=renderer, run=record, checkpoints=checkpoints)
    with record.spans("start"):
        policy.sleep()  # vLLM takes its share of a GPU at once, and must find it free
        crew = build_crew(settings, renderer, world)
        crew.engine.sleep()
        policy.wake()
        crew.engine.run(task.start())
    if is_sft:
        with record.spans("sync"):
            crew.engine.load_weights(policy.hf_weights(), version=0)
            policy.sleep()
            crew.engine.wake()
    else:
        with checkpoints.settled_on_failure():
            train(settings, task=task, policy=policy, crew=crew, run=record, checkpoints=checkpoints)
    with record.spans("evaluate"):
        evaluation, failure = evaluated(task, settings, crew)
    with record.spans("checkpoint"):
        checkpoints.step_done(num_steps, history=record.history, metrics=evaluation)
        checkpoints.settle()
    with record.spans("save"), writing(record.folder):
        save(policy, record, with_adapter=settings.lora.rank > 0)
    if failure is not None:
        raise failure
    if not is_sft and settings.run.require_improvement:
        check_improvement(record.history.returns)
    record.finish(evaluation)
    crew.engine.run(task.close())
    crew.engine.close()


def evaluated(task: Task, settings: Settings, crew: Crew) -> tuple[dict[str, float], RunFailed | None]:
    """The last evaluation, or why there is none. That is for the run's end: what was trained is saved first."""
    try:
        return evaluate(task, settings, crew=crew), None
    except RunFailed as failure:
        return {}, failure


def save(policy: Policy, record: Run, *, with_adapter: bool) -> None:
    policy.wake()
    policy.save_hf(record.final)
    if with_adapter:
        policy.save_adapter(record.folder / "adapter")


def rehearse(settings: Settings, world: World) -> None:
    """Print the plan of memory on the main rank; a released model's name on the hub is enough of a model.path."""
    model, size = known_config(settings.model.path), settings.run.world or world.size
    check_sizes(settings, model, size)
    if world.is_main:
        dry_run(model, settings, world_size=size)


def check(settings: Settings, world_size: int) -> None:
    """What can be known before any process talks to another; every rank raises the same ValueError."""
    check_sizes(settings, read_config(settings.model.path), world_size)
    device, has_cuda = settings.engine.device, torch.cuda.is_available()
    require(device != "cuda" or has_cuda, "engine.device", device, "this machine has no usable GPU; use engine.device=auto")


def check_examples(task: Task, stage: str) -> None:
    """Whatever a run will read is looked at when it starts: an evaluation split may be needed only hours later."""
    for split in ("train", "eval") if stage == "grpo" else ("eval",):
        require(len(task.examples(split)) > 0, "task.name", task.name, f"has no examples in its split {split}; give it some")


def check_sizes(settings: Settings, model: Qwen2_5_VLConfig, world_size: int) -> None:
    """The layout, the frozen parts and the engine against the model and the number of processes."""
    check_layout(settings.parallel, model, world_size)
    remedy = "with lora.rank the whole base is frozen; choose what is trained by lora.targets"
    require(not (settings.model.frozen and settings.lora.rank), "model.frozen", settings.model.frozen, remedy)
    engine: EngineSettings = settings.engine
    require(world_size % engine.tp == 0, "engine.tp", engine.tp, f"must divide the {world_size} processes")
    heads = model.text_config.num_key_value_heads
    require(heads % engine.tp == 0, "engine.tp", engine.tp, f"does not divide the model's {heads} key/value heads")


def build_task(settings: TaskSettings, tasks: Mapping[str, Callable[[TaskSettings], Task]]) -> Task:
    require(settings.name in tasks, "task.name", settings.name, f"no such task; choose one of {', '.join(sorted(tasks))}")
    return tasks[settings.name](settings)


def build_policy(settings: Settings, layout: Layout, renderer: Renderer, *, num_steps: int) -> Policy:
    """This rank's share of the model with its optimizer, for as many updates as the stage's steps make."""
    is_sft = settings.stage == "sft"
    return Policy(
        settings.model, layout,
        parallel=settings.parallel, optimizer=settings.sft if is_sft else settings.algo,
        num_updates=num_steps if is_sft else num_steps * settings.algo.epochs * settings.algo.minibatches,
        banned_ids=renderer.banned_ids, image_token_id=renderer.image_token_id,
        temperature=1.0 if is_sft else settings.algo.temperature,
        keep_reference=not is_sft and settings.algo.kl_coef > 0, bucket_mib=settings.engine.bucket_mib,
        lora=settings.lora, seed=settings.run.seed,
    )  # fmt: skip


def build_crew(settings: Settings, renderer: Renderer, world: World) -> Crew:
    """This process's engine: one alone, or one that spans engine.tp neighboring ranks. All ranks build together."""
    group, size = None, settings.engine.tp
    if size > 1:
        groups = [dist.new_group(list(range(first, first + size)), backend="gloo") for first in range(0, world.size, size)]
        group = groups[world.rank // size]
    engine = Engine(
        settings.model.path, settings.engine, image_token_id=renderer.image_token_id,
        banned_ids=renderer.banned_ids, stop_ids=renderer.stop_ids, group=group,
    )  # fmt: skip
    return Crew(engine, renderer, index=world.rank // size, num_engines=world.size // size)
