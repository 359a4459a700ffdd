"""One gymnasium environment in a process of its own: creation, checks, frames and steps.

The functions raise `Refused` for an environment that task=gymnasium cannot run. Exceptions of the
environment are not caught. This module does not import torch.
"""

import base64
import difflib
import enum
import importlib
import random
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from PIL import Image

from megatron_rl.tasks.gymnasium_envs.action_grammar import Action, ActionGrammar

MAX_NUMBERS = 16
"""Maximum number of numbers in an action of a MultiDiscrete or Box space."""
OWN = "megatron_rl.tasks.gymnasium_envs.environments"
KNOWN_MODULES = {
    "MiniGrid-": ("minigrid", "minigrid"),
    "BabyAI-": ("minigrid", "minigrid"),
    "MiniWorld-": ("miniworld", "miniworld"),
    "ALE/": ("ale_py", "ale-py"),
    "Crafter": (f"{OWN}.crafter_world", "crafter"),
    "miniwob": (f"{OWN}.miniwob_pages", "miniwob"),
    "puzzles/": (f"{OWN}.puzzles", "megatron-rl"),
    "gym_cards/": ("megatron_rl.tasks.gym_cards", "megatron-rl"),
}
"""Maps the beginning of an id to the module that registers the environment, and its package. These
ids need no module.
"""


class Refused(ValueError):
    """An environment that cannot be run. The arguments are key, value and remedy."""


@runtime_checkable
class _HasActionEnum(Protocol):
    actions: Any


@runtime_checkable
class _HasActionMeanings(Protocol):
    def get_action_meanings(self) -> list[str]: ...


@dataclass(slots=True, frozen=True, kw_only=True)
class EpisodeSpec:
    """Environment to create, and the size of its frames."""

    id: str
    kwargs: dict[str, Any]
    image_side: int
    actions: list[str]


def import_environment(full_id: str) -> str:
    """Import the module that registers an environment, and return the id without the module."""
    module, _, name = full_id.rpartition(":")
    known = next((names for start, names in KNOWN_MODULES.items() if name.startswith(start)), None)
    if not module and known is not None:
        module = known[0]
    if module:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            remedy = f"no module named {error.name}"
            if known is not None and error.name in (known[0], known[1]):
                raise Refused("task.options.id", full_id, f"{remedy}; install its package: pip install {known[1]}") from error
            raise Refused("task.options.id", full_id, f"{remedy}; install its package, or add its folder to PYTHONPATH") from error
    if name not in gymnasium.registry:
        near = difflib.get_close_matches(name, gymnasium.registry, cutoff=0.75)
        remedy = f"not registered; did you mean {' or '.join(near)}?" if near else "not registered; name its module: my_module:MyEnv-v0"
        raise Refused("task.options.id", full_id, remedy)
    return name


def make_environment(spec: EpisodeSpec) -> gymnasium.Env:
    """Create the environment.

    Raises:
        Refused: The environment does not exist, needs a package or cannot render.
    """
    name = import_environment(spec.id)
    try:
        env = gymnasium.make(name, render_mode="rgb_array", disable_env_checker=True, **spec.kwargs)
    except ModuleNotFoundError as error:
        raise Refused("task.options.id", spec.id, f"needs the module {error.name}; install the package that has it") from error
    except gymnasium.error.DependencyNotInstalled as error:
        raise Refused("task.options.id", spec.id, f"a package is missing: {_one_line(error)}") from error
    modes = env.metadata.get("render_modes", [])
    if "rgb_array" not in modes:
        env.close()
        remedy = f"renders no pictures; its metadata must have the render mode rgb_array and not only {modes}"
        raise Refused("task.options.id", spec.id, remedy)
    return env


def read_action_names(env: gymnasium.Env, space: spaces.Discrete) -> list[str]:
    """Return the names that an environment gives to its actions; an empty list if it has none.

    A wrapper that changes the action space also changes the meaning of the actions, so the names of
    the environment in it are not used.
    """
    unwrapped, values = env.unwrapped, range(int(space.start), int(space.start + space.n))
    if unwrapped.action_space != space:
        return []
    if isinstance(unwrapped, _HasActionMeanings):
        meanings = [str(name) for name in unwrapped.get_action_meanings()]
        return meanings if len({*meanings}) == len(meanings) == space.n else []
    if isinstance(unwrapped, _HasActionEnum) and isinstance(unwrapped.actions, type) and issubclass(unwrapped.actions, enum.IntEnum):
        names = {int(member): member.name for member in unwrapped.actions}
        return [names[value] for value in values] if names.keys() >= {*values} else []
    return []


def make_grammar(env: gymnasium.Env, spec: EpisodeSpec) -> ActionGrammar:
    """Return the grammar of the environment's actions.

    Raises:
        Refused: The space is not supported, or the configured names do not fit.
    """
    space = env.action_space
    if isinstance(space, spaces.Discrete):
        names = spec.actions or read_action_names(env, space)
        _require(len(names) in (0, space.n), "task.options.actions", names, f"must be {space.n} names, one for each action of {spec.id}")
        first = int(space.start)
        return ActionGrammar(low=[first], high=[first + int(space.n) - 1], is_integer=True, names=names)
    _require(not spec.actions, "task.options.actions", spec.actions, f"names actions, but {spec.id} has the space {space}; remove it")
    if isinstance(space, spaces.Text):
        low, high, characters = int(space.min_length), int(space.max_length), "".join(sorted(space.character_set))
        return ActionGrammar(low=[low], high=[high], is_integer=True, names=[], characters=characters)
    if isinstance(space, spaces.MultiDiscrete):
        low, high = space.start.ravel(), (space.start + space.nvec - 1).ravel()
    else:
        remedy = f"has the action space {_one_line(space)}; only Discrete, MultiDiscrete, Box and Text are supported: wrap it"
        _require(isinstance(space, spaces.Box), "task.options.id", spec.id, remedy)
        assert isinstance(space, spaces.Box)
        low, high = space.low.ravel(), space.high.ravel()
        remedy = f"has an action without bounds ({_one_line(space)}); wrap it in gymnasium.wrappers.RescaleAction or another wrapper"
        _require(bool(np.isfinite(low).all() and np.isfinite(high).all()), "task.options.id", spec.id, remedy)
    remedy = f"has {low.size} numbers in an action; at least 1 and at most {MAX_NUMBERS} are supported: wrap it"
    _require(1 <= low.size <= MAX_NUMBERS, "task.options.id", spec.id, remedy)
    is_integer = bool(np.issubdtype(space.dtype, np.integer))
    _require(is_integer or bool(np.issubdtype(space.dtype, np.floating)), "task.options.id", spec.id, f"has actions of type {space.dtype}")
    read = int if is_integer else lambda value: float(str(value))  # shortest decimal: 0.7 and not 0.699999988
    return ActionGrammar(low=[read(x) for x in low], high=[read(x) for x in high], is_integer=is_integer, is_list=True, names=[])


class Episode:
    """Environment of one episode, with frames as RGB images of the configured size."""

    def __init__(self, spec: EpisodeSpec) -> None:
        self.spec, self.env = spec, make_environment(spec)
        self.action_space = deepcopy(self.env.action_space)
        self.observation: Any = None
        """Observation that the last `reset` or `step` of the environment returned."""

    def describe(self) -> dict[str, Any]:
        """Return the grammar as JSON values."""
        return asdict(make_grammar(self.env, self.spec))

    def reset(self, seed: int, *, grammar: dict[str, Any]) -> dict[str, Any]:
        """Start the episode and return the first observation.

        The global generators of Python and numpy are seeded too, for environments that draw from
        them instead of their own. The argument `grammar` is the one that the policy knows; it
        differs from this environment's if the action space depends on more than the settings.
        """
        has_changed = f"has another action space than when it was checked: {_one_line(self.action_space)}; the space must stay the same"
        _require(self.describe() == grammar, "task.options.id", self.spec.id, has_changed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        observation, _ = self.env.reset(seed=seed)
        return self._observe(observation)

    def step(self, numbers: Action) -> dict[str, Any]:
        """Apply an action and return the observation, the reward and the flags of the step."""
        observation, reward, is_terminated, is_truncated, info = self.env.step(self._to_action(numbers))
        reward = float(reward)
        _require(bool(np.isfinite(reward)), "task.options.id", self.spec.id, f"returned the reward {reward}; correct or wrap it")
        flags = {"is_terminated": bool(is_terminated), "is_truncated": bool(is_truncated)}
        return {**self._observe(observation), "reward": reward, **flags, "is_solved": bool(info["success"]) if "success" in info else None}

    def _to_action(self, numbers: Action) -> Any:
        space = self.action_space
        if isinstance(space, spaces.Discrete):
            return space.dtype.type(numbers[0])
        if isinstance(space, spaces.Text):
            return numbers[0]
        action = np.array(numbers, space.dtype).reshape(space.shape)
        return np.clip(action, space.low, space.high) if isinstance(space, spaces.Box) else action

    def _observe(self, observation: object) -> dict[str, Any]:
        remedy = f"changed its action space from {self.action_space} to {self.env.action_space}; the space must stay the same: wrap it"
        _require(self.env.action_space == self.action_space, "task.options.id", self.spec.id, _one_line(remedy))
        has_nan = "returned an observation that contains NaN; correct or wrap it"
        _require(not _has_nan(observation), "task.options.id", self.spec.id, has_nan)
        self.observation = observation
        frame = scale_frame(self._render(), self.spec.image_side)
        return {"size": frame.size, "rgb": base64.b64encode(frame.tobytes()).decode(), "text": read_texts(observation)}

    def _render(self) -> NDArray[np.uint8]:
        try:
            frame: Any = self.env.render()
        except gymnasium.error.DependencyNotInstalled as error:
            raise Refused("task.options.id", self.spec.id, f"a package is missing: {_one_line(error)}") from error
        is_array = isinstance(frame, np.ndarray)
        shape = f"{frame.dtype} {frame.shape}" if is_array else type(frame).__name__
        is_picture = is_array and frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3 and frame.size > 0
        _require(is_picture, "task.options.id", self.spec.id, f"rendered {shape} instead of an array of uint8 (height, width, 3); wrap it")
        return frame


def scale_frame(frame: NDArray[np.uint8], side: int) -> Image.Image:
    """Return the frame as an image with the longer side `side`; 0 keeps the size.

    Enlarging repeats pixels, and shrinking averages them.
    """
    picture = Image.fromarray(frame)
    longer = max(picture.size)
    if side in (0, longer):
        return picture
    width, height = (max(1, round(length * side / longer)) for length in picture.size)
    return picture.resize((width, height), Image.Resampling.NEAREST if side > longer else Image.Resampling.BOX)


def read_texts(observation: object) -> str:
    """Return the texts of an observation: a text, or those among the values of a dict.

    Several texts of a dict are returned as lines `key: text`.
    """
    if isinstance(observation, str):
        return observation
    if not isinstance(observation, Mapping):
        return ""
    texts = {str(key): value for key, value in observation.items() if isinstance(value, str)}
    return "\n".join(texts.values() if len(texts) == 1 else (f"{key}: {value}" for key, value in texts.items()))


def _has_nan(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_nan, value.values()))
    if isinstance(value, tuple | list):
        return any(map(_has_nan, value))
    is_float = isinstance(value, float | np.floating) or (isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating))
    return bool(is_float and np.isnan(value).any())  # pyright: ignore[reportArgumentType, reportCallIssue]


def _one_line(value: object) -> str:
    return re.sub(r"\s+", " ", str(value))


def _require(condition: bool, key: str, value: object, remedy: str) -> None:
    if not condition:
        raise Refused(key, value, remedy)
