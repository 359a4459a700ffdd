"""Registry of tasks, reward functions and algorithms, both built-in and from user plugins."""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import yaml

from megatron_rl.algo.algorithms import ALGORITHMS, Algorithm
from megatron_rl.callbacks import NO_CALLBACKS, Callbacks
from megatron_rl.config import Settings, TaskSettings, require
from megatron_rl.config.serve import ServeSettings
from megatron_rl.rewards.functions import from_function
from megatron_rl.rollout.engine import InferenceEngine
from megatron_rl.rollout.task import Task, require_task
from megatron_rl.tasks.agent.task import AgentTask
from megatron_rl.tasks.alfworld.task import AlfworldTask
from megatron_rl.tasks.gym_cards.blackjack_task import BlackjackTask
from megatron_rl.tasks.gym_cards.points_task import EZPointsTask, Points24Task
from megatron_rl.tasks.gym_cards.task import NumberLineTask
from megatron_rl.tasks.gymnasium_envs.task import GymnasiumTask
from megatron_rl.tasks.lewis.listener_task import LewisListenerTask
from megatron_rl.tasks.lewis.speaker_task import LewisSpeakerTask
from megatron_rl.tasks.visual_python.task import VisualPythonTask
from megatron_rl.tasks.visual_search.task import VisualSearchTask
from megatron_rl.tasks.vqa import VqaTask

if TYPE_CHECKING:  # import torch and fastapi
    from megatron_rl.rollout.renderer import Renderer
    from megatron_rl.tasks.agent.inference import PolicyEndpoint

TASKS: Mapping[str, type[Task]] = {
    "agent": AgentTask,
    "alfworld": AlfworldTask,
    "blackjack": BlackjackTask,
    "ez_points": EZPointsTask,
    "gymnasium": GymnasiumTask,
    "lewis_listener": LewisListenerTask,
    "lewis_speaker": LewisSpeakerTask,
    "number_line": NumberLineTask,
    "points24": Points24Task,
    "visual_python": VisualPythonTask,
    "visual_search": VisualSearchTask,
    "vqa": VqaTask,
}
"""Built-in task classes, keyed by task.name."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Plugins:
    """Tasks, reward functions and algorithms defined in a user's plugin file, keyed by name."""

    tasks: Mapping[str, type[Task]] = field(default_factory=dict)
    """Task classes, keyed by task.name."""
    rewards: Mapping[str, Callable[..., object]] = field(default_factory=dict)
    """Plain reward functions (rewards/functions.py), keyed by their name in task.reward."""
    algorithms: Mapping[str, Algorithm] = field(default_factory=dict)
    """Algorithms, keyed by algo.name."""
    callbacks: Callbacks = NO_CALLBACKS
    """Functions that are called during training."""


def build_task(settings: TaskSettings, plugins: Plugins = Plugins()) -> Task:
    """Build the task selected by task.name, with the rubric selected by task.reward.

    If task.reward is empty, the task's default reward is used. Otherwise, task.reward is a list of
    names joined by +. Each name is a reward function in `plugins` or a built-in reward of the task;
    at most one built-in reward is allowed.

    Raises:
        ValueError: The task or a reward is unknown, or the settings specify options or a judge that
            the task does not support.
    """
    tasks = {**TASKS, **plugins.tasks}
    require(settings.name in tasks, "task.name", settings.name, f"no such task; choose one of {', '.join(sorted(tasks))}")
    task_type = tasks[settings.name]
    require_task(settings.name, task_type)
    names = settings.reward.split("+") if settings.reward else []
    shipped = [name for name in names if name not in plugins.rewards]
    choices = [*task_type.reward_names, *plugins.rewards]
    joined = "; at most one built-in reward, joined with your own by +" if task_type.reward_names else ""
    remedy = f"task {settings.name} accepts {', '.join(choices) or 'only its own reward'}{joined}"
    require({*shipped} <= {*task_type.reward_names} and len(shipped) <= 1, "task.reward", settings.reward, remedy)
    remedy = f"task {settings.name} has no options of its own"
    require(settings.options is None or task_type.Options is not None, "task.options", settings.options, remedy)
    require(
        _is_plain_value(settings.options),
        "task.options",
        settings.options,
        "must be storable as YAML; use only numbers, strings, lists and mappings",
    )
    task = task_type(replace(settings, reward="".join(shipped)))
    asks = task.judge is not None or not (settings.judge.model or settings.judge.urls)
    require(asks, "task.judge.model", settings.judge.model, f"task {settings.name} uses no judge; remove this setting")
    task.rubric = from_function(settings.reward, task.rubric, plugins.rewards)
    return task


def make_policy_endpoint(engine: InferenceEngine, renderer: "Renderer", settings: ServeSettings, **given: Any) -> "PolicyEndpoint":
    """Return the endpoint of a trained policy; see PolicyEndpoint for the arguments."""
    from megatron_rl.tasks.agent.inference import PolicyEndpoint  # imports fastapi

    return PolicyEndpoint(engine, renderer, settings, **given)


def serve_policy_endpoint(endpoint: "PolicyEndpoint", settings: ServeSettings, **given: Any) -> Coroutine[object, object, None]:
    """Return the coroutine that serves an endpoint; see `serve_endpoint` for the arguments."""
    from megatron_rl.tasks.agent.inference import serve_endpoint  # imports fastapi

    return serve_endpoint(endpoint, settings, **given)


def uses_sandbox(settings: Settings, plugins: Plugins = Plugins()) -> bool:
    """Return True if episodes run code in sandboxes that the rollout processes start themselves."""
    tasks = {**TASKS, **plugins.tasks}
    return settings.task.name in tasks and tasks[settings.task.name].runs_code and not settings.task.sandbox.url


def _is_plain_value(options: object) -> bool:
    try:
        yaml.safe_dump(asdict(options) if is_dataclass(options) and not isinstance(options, type) else options)
    except yaml.YAMLError:
        return False
    return True


def has_critic(settings: Settings, plugins: Plugins = Plugins()) -> bool:
    """Return True if the run trains a critic in addition to the policy."""
    return settings.stage == "rl" and {**ALGORITHMS, **plugins.algorithms}[settings.algo.name].needs_critic
