"""Tables of tasks, rewards and algorithms by name, including a user's plugins."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace

import yaml

from megatron_rl.algo.algorithms import ALGORITHMS, Algorithm
from megatron_rl.config import Settings, TaskSettings, require
from megatron_rl.rewards.functions import from_function
from megatron_rl.rollout.task import Task, require_task
from megatron_rl.tasks.alfworld.task import AlfworldTask
from megatron_rl.tasks.gym_cards.blackjack_task import BlackjackTask
from megatron_rl.tasks.gym_cards.points_task import EZPointsTask, Points24Task
from megatron_rl.tasks.gym_cards.task import NumberLineTask
from megatron_rl.tasks.lewis.listener_task import LewisListenerTask
from megatron_rl.tasks.lewis.speaker_task import LewisSpeakerTask
from megatron_rl.tasks.visual_python.task import VisualPythonTask
from megatron_rl.tasks.visual_search.task import VisualSearchTask
from megatron_rl.tasks.vqa import VqaTask

TASKS: Mapping[str, type[Task]] = {
    "alfworld": AlfworldTask,
    "blackjack": BlackjackTask,
    "ez_points": EZPointsTask,
    "lewis_listener": LewisListenerTask,
    "lewis_speaker": LewisSpeakerTask,
    "number_line": NumberLineTask,
    "points24": Points24Task,
    "visual_python": VisualPythonTask,
    "visual_search": VisualSearchTask,
    "vqa": VqaTask,
}
"""Built-in tasks by task.name."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Plugins:
    """Tasks, rewards and algorithms from a user's file, by the names that settings use."""

    tasks: Mapping[str, type[Task]] = field(default_factory=dict)
    """Task classes by task.name."""
    rewards: Mapping[str, Callable[..., object]] = field(default_factory=dict)
    """Reward functions by task.reward: plain functions (rewards/functions.py)."""
    algorithms: Mapping[str, Algorithm] = field(default_factory=dict)
    """Algorithms by algo.name."""


def build_task(settings: TaskSettings, plugins: Plugins = Plugins()) -> Task:
    """Build the task with the chosen reward.

    task.reward may name a user's functions, alone or joined by + with one built-in reward. Raises
    ValueError if the settings name an unknown task or reward, or options or a judge that the task
    does not have.
    """
    tasks = {**TASKS, **plugins.tasks}
    require(settings.name in tasks, "task.name", settings.name, f"no such task; choose one of {', '.join(sorted(tasks))}")
    task_type = tasks[settings.name]
    require_task(settings.name, task_type)
    names = settings.reward.split("+") if settings.reward else []
    shipped = [name for name in names if name not in plugins.rewards]
    choices = [*task_type.reward_names, *plugins.rewards]
    joined = "; at most one that ships, with your own joined by +" if task_type.reward_names else ""
    remedy = f"task {settings.name} takes {', '.join(choices) or 'none but its own'}{joined}"
    require({*shipped} <= {*task_type.reward_names} and len(shipped) <= 1, "task.reward", settings.reward, remedy)
    remedy = f"task {settings.name} has no options of its own"
    require(settings.options is None or task_type.Options is not None, "task.options", settings.options, remedy)
    require(
        _is_plain_value(settings.options),
        "task.options",
        settings.options,
        "is kept as yaml; use numbers, text, lists and mappings of them",
    )
    task = task_type(replace(settings, reward="".join(shipped)))
    asks = task.judge is not None or not (settings.judge.model or settings.judge.urls)
    require(asks, "task.judge.model", settings.judge.model, f"task {settings.name} asks no judge; leave it out")
    task.rubric = from_function(settings.reward, task.rubric, plugins.rewards)
    return task


def uses_sandbox(settings: Settings, plugins: Plugins = Plugins()) -> bool:
    """Return True if the rollout processes start sandboxes because the task's episodes run code."""
    tasks = {**TASKS, **plugins.tasks}
    return settings.task.name in tasks and tasks[settings.task.name].runs_code and not settings.task.sandbox.url


def _is_plain_value(options: object) -> bool:
    try:
        yaml.safe_dump(asdict(options) if is_dataclass(options) else options)
    except yaml.YAMLError:
        return False
    return True


def has_critic(settings: Settings, plugins: Plugins = Plugins()) -> bool:
    """Return True if the run trains a value function besides the policy."""
    return settings.stage == "rl" and {**ALGORITHMS, **plugins.algorithms}[settings.algo.name].needs_critic
